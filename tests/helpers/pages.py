"""A report page as a reader of HTML sees it."""

import re
from html.parser import HTMLParser

from helpers.studies import A

VOID = {"meta", "br", "hr", "img", "input", "link", "path", "use", "rect", "circle", "image", "stop"}


class Page(HTMLParser):
    """What a page consists of, and whether every element that is opened is closed."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.attributes, self.open, self.text, self.cells = [], [], [], {}, []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th"):
            self.cells[-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.text[self.open[-1]] = self.text.get(self.open[-1], "") + data
            if self.open[-1] in ("td", "th"):
                self.cells[-1][-1] += data


# -- experiments with mixtures, and what is on their pages -------------------------------------------------------------


FEW = {"lr": 0.05, "epochs": 2, "batch_size": 4, "optimizer": "adamw"}
MIXTURE = {
    **A, "name": "AEM", "algorithm": "aem",
    "mixture": {"gating": FEW, "solver": FEW},
}  # fmt: skip
STEADY = {"shift": {"who": "always"}, "rounds": 4}


def texts(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)
