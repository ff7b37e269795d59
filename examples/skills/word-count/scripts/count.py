"""Count the words of a text, common ones left out."""

import csv
import sys
from pathlib import Path

from words import words_of  # beside this file

COMMON = set(Path("references/common.txt").read_text().split())


def main(name: str, how_many: str = "3") -> None:
    """Write words.csv and print the most frequent words."""
    counted = words_of(Path(name).read_text(), COMMON)
    with open("words.csv", "w", newline="") as file:
        csv.writer(file).writerows([("word", "count"), *counted.most_common()])
    for word, count in counted.most_common(int(how_many)):
        print(f"{count:4} {word}")


main(*sys.argv[1:])
