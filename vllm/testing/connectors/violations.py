# SPDX-License-Identifier: Apache-2.0
"""How a connector can break its contract, each with a name."""

from __future__ import annotations

#: name -> what it means
VIOLATIONS = {
    "metadata-not-picklable": "build_connector_meta's result does not survive pickling",
    "step-changed": "build_connector_meta changed the scheduler's output",
    "matched-too-much": "get_num_new_matched_tokens found more tokens than the request has",
    "wrong-bits": "state that was loaded is not what had been computed for these tokens",
    "broken-data-decoded": "damaged data was used without a reported load error",
    "not-recomputed": "a request whose load failed did not end with the tokens of computing it",
    "never-settles": "a request, a transfer or has_pending_push_work never ends",
    "blocks-leaked": "blocks are held although no request is left",
    "descriptors-leaked": "file descriptors are open after shutdown",
    "threads-leaked": "threads run after shutdown",
    "raised": "a call raised an exception",
    "nothing-loaded": "a prompt that was stored was not found again",
}


class ContractViolation(AssertionError):
    """`name`: a key of `VIOLATIONS`."""

    def __init__(self, name: str, detail: str) -> None:
        super().__init__(f"{name}: {VIOLATIONS[name]}: {detail}")
        self.name = name
