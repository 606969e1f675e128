# SPDX-License-Identifier: Apache-2.0
import signal
import subprocess
import sys
from pathlib import Path

import psutil

SERVER = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Healthy(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

HTTPServer(("127.0.0.1", int(sys.argv[2])), Healthy).serve_forever()
"""
BENCHMARK = """
import sys
import time

from benchmarks.served_process import ServedProcess

with ServedProcess([sys.argv[1]], 60) as server:
    print(server.process.pid, flush=True)
    time.sleep(600)
"""


def test_a_benchmark_that_is_told_to_stop_takes_its_server_along(tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    command = [sys.executable, "-c", BENCHMARK, str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as benchmark:
        assert benchmark.stdout is not None
        server = psutil.Process(int(benchmark.stdout.readline()))
        assert server.is_running()
        benchmark.terminate()
        assert benchmark.wait(60) == 128 + signal.SIGTERM
    assert not server.is_running()
