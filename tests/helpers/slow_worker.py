"""A node's worker that takes its time, by the name of the node."""

import json
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

from fedtide.site.node_process import answer_questions
from fedtide.site.seat import node_of

SECONDS = {"lyon": 1.0, "oslo": 8.0}


def main(told, line):
    node, seconds = node_of(told), SECONDS.get(Path(told["ticket"]).stem, 0.0)

    def handle(header, payload):
        if header.get("kind") == "ask":
            time.sleep(seconds)
        return node.handle(header, payload)

    answer_questions(Connection(line), handle, print)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), int(sys.argv[2]))
