# SPDX-License-Identifier: Apache-2.0
"""Capture state."""

import pytest

from vllm.compilation.monitor import capturing, is_capturing


def test_state_ends_with_the_block_also_on_failure() -> None:
    assert not is_capturing()
    with pytest.raises(KeyError), capturing():
        assert is_capturing()
        raise KeyError
    assert not is_capturing()


def test_captures_do_not_nest() -> None:
    with capturing(), pytest.raises(RuntimeError, match="already"), capturing():
        pass
    assert not is_capturing()
