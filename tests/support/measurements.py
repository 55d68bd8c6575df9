"""Measurements that tests start in processes of their own."""

import os
import signal
import time
from dataclasses import dataclass

from shoal.papers.table import unfinished_folder


@dataclass(frozen=True)
class Named:
    """A measurement that its name tells from others."""

    name: str
    seeded, instant = False, False

    def key(self, quick):
        return self.name

    def needs(self, quick):
        return ""

    def figures(self, line):
        return {}


class Timed(Named):
    """A measurement that takes no time, and says otherwise."""

    def measure(self, job):
        return {"accuracy": 0.5, "step_seconds": 1.0}


class Killer(Named):
    """A measurement whose process is killed."""

    def measure(self, job):
        unfinished_folder(job.unfinished, self.name, job.seed).mkdir()
        os.kill(os.getpid(), signal.SIGKILL)


class Sleeper(Named):
    """A measurement that takes ten minutes."""

    def measure(self, job):
        print("begun", flush=True)
        time.sleep(600)
