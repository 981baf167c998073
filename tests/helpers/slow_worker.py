"""A node's worker that takes its time, by the name of the node."""

import json
import sys
import time
from pathlib import Path

from fedtide.deploy.flower.worker import serve
from fedtide.deploy.work import node_of

SECONDS = {"lyon": 2.0, "oslo": 20.0}


def main(told, socket):
    node, seconds = node_of(told), SECONDS.get(Path(told["ticket"]).stem, 0.0)

    def handle(header, payload):
        if header.get("kind") == "ask":
            time.sleep(seconds)
        return node.handle(header, payload)

    serve(socket, handle)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]))
