# SPDX-License-Identifier: Apache-2.0
"""Python calls, one per line, between `<function_calls>` tags: OLMo 3."""

from vllm.tool_parsers.python_call import PythonCallReader
from vllm.tool_parsers.pythonic import PythonCallParser

OPEN = "<function_calls>"
CLOSE = "</function_calls>"


class Olmo3ToolParser(PythonCallParser):
    r"""`<function_calls>f(a=1)\ng(b="x")</function_calls>`.

    A forgotten closing tag loses no call.
    """

    tags = (OPEN, CLOSE)
    openings = (OPEN,)

    def _begin_call(self) -> None:
        self._call = PythonCallReader()
        self._read = self._read_before_call

    def _read_behind_call(self) -> bool:
        if not self._take_space():
            return False
        if self._pending.startswith(CLOSE):
            self._report()
            self._pending = self._pending.removeprefix(CLOSE)
            self._read = self._read_content
        elif CLOSE.startswith(self._pending):
            return False
        elif "\n" in self._held[len(self._held.rstrip()) :]:
            self._report()
            self._begin_call()
        else:
            return self._refuse()
        return True
