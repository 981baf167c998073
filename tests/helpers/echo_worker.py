"""A worker that sends back what it is asked, or does what its header tells it to."""

import os
import sys
import time
from multiprocessing.connection import Connection

from fedtide.site.node_process import answer_questions


def handle(header, payload):
    time.sleep(header.get("sleep", 0.0))
    if header.get("die"):
        os._exit(9)
    if header.get("raise"):
        raise ValueError("a secret of the clients")
    return {"echo": header, "pid": os.getpid()}, payload * header.get("times", 1)


if __name__ == "__main__":
    answer_questions(Connection(int(sys.argv[-1])), handle, print)
