"""Settings of the engine process."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from llmrun.engine import environment


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a niceness of threads")
@pytest.mark.parametrize("more", [0, 15])
def test_a_thread_that_gives_way_leaves_others_as_they_are(more: int) -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before, found = niceness(), []
    own = min(before + more, 19)

    def lower_priority() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), own)
        for _ in range(2):
            environment.lower_thread_priority()
            found.append(niceness())

    thread = threading.Thread(target=lower_priority)
    thread.start()
    thread.join()
    assert niceness() == before
    assert found == [max(own, environment._NICENESS)] * 2
