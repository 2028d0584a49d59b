"""The fake task with simulators that run beside the caller and take a random time, as real ones do."""

import os
import threading
import time

from rlt_gym.testing import FakeRLTokenVectorEnv


class SleepyVectorEnv(FakeRLTokenVectorEnv):
    """
    A step is played by a thread, after up to ``longest`` seconds, by the operating system's dice.

    ``events`` has "begin", "played" and "end" of each step, in the order in which they happened.
    """

    def __init__(self, *args, longest=0.01, **kwargs):
        super().__init__(*args, **kwargs)
        self.longest, self.events = longest, []

    def _begin_play(self, chunks):
        self.events.append("begin")

        def play():
            time.sleep(self.longest * os.urandom(1)[0] / 255)
            self._answer = self._play(chunks)
            self.events.append("played")

        self._thread = threading.Thread(target=play)
        self._thread.start()

    def _end_play(self, chunks):
        self._thread.join()
        self.events.append("end")
        return self._answer
