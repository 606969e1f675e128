# SPDX-License-Identifier: Apache-2.0
"""Runs the fuzzer for as many requests, or as long, as asked:

    python -m tests.fuzz --requests 10000
    python -m tests.fuzz --hours 8 --seed 1000
    python -m tests.fuzz --only 1234       # one scenario again, by its seed

Exits 1 after the scenarios if anything was found. A scenario's seed decides its requests; what
threads and processes do at the same time it cannot decide.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import logging
import sys
import time

from tests.fuzz.book import Tally
from tests.fuzz.scenarios import Fuzzer

#: a scenario that takes longer is stuck where its own time limits do not reach
_STUCK_S = 900


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--requests", type=int, default=1000, help="stop after this many")
    parser.add_argument("--hours", type=float, help="stop after this time instead")
    parser.add_argument("--seed", type=int, default=0, help="of the first scenario")
    parser.add_argument("--only", type=int, help="run the scenario of this seed alone")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    began = time.monotonic()
    total = Tally()
    with Fuzzer() as fuzzer:
        for seed in itertools.count(args.seed) if args.only is None else [args.only]:
            faulthandler.dump_traceback_later(_STUCK_S, exit=True)
            tally = fuzzer.run(seed)
            total.add(tally)
            minutes = (time.monotonic() - began) / 60
            print(f"{minutes:6.1f} min, seed {seed}: {total}", flush=True)
            for finding in tally.findings:
                print(f"  FOUND {finding}", flush=True)
            done = total.requests >= args.requests
            if args.hours is not None:
                done = minutes >= 60 * args.hours
            if done:
                break
    faulthandler.cancel_dump_traceback_later()
    return 1 if total.findings else 0


if __name__ == "__main__":
    sys.exit(main())
