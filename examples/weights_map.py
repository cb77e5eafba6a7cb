"""Which words look at which: a map of the weights of three heads, as SVG.

python examples/weights_map.py [--out weights.svg]

The heads are made by hand. The first looks at the word before, by a relative bias. The second looks for what a word
refers to: each query asks for properties, and the keys tell them; who finds nothing looks at the start, as heads of
trained models do. The third looks at all words alike. For a model of your own, pass its queries and keys. In notebooks,
``IPython.display.SVG(picture(weights, words, HEADS))`` shows the map.
"""

import argparse
from html import escape
from pathlib import Path

import numpy as np

import attnmask

SENTENCE = [  # a word, what it is, and what it looks for
    ("<s>", "start", ""),
    ("the", "", ""),
    ("cat", "noun one", ""),
    ("that", "", "noun one"),
    ("chased", "verb", "noun one"),
    ("the", "", ""),
    ("dogs", "noun many", "verb"),
    ("was", "verb", "noun one"),
    ("tired", "", "noun one"),
    ("because", "", "verb"),
    ("they", "", "noun many"),
    ("ran", "verb", "noun many"),
]
HEADS = ["the word before", "what it refers to", "all words alike"]
CELL, LEFT, TOP = 22, 70, 90


def queries_and_keys():
    """Return them as [1, words, heads, channels], with a channel for each property, and a bias by distance."""
    names = sorted({name for _, told, asked in SENTENCE for name in f"{told} {asked}".split()})
    told, asked = (
        np.array([[name in word[place].split() for name in names] for word in SENTENCE], np.float32)
        for place in (1, 2)
    )
    asked = 5 * asked
    asked[:, names.index("start")] = 3
    query, key = np.zeros((2, 1, len(SENTENCE), len(HEADS), len(names)), np.float32)
    query[0, :, 1], key[0, :, 1] = asked, told
    bias = np.zeros(
        (len(HEADS), 3), np.float32
    )  # of the distances -2, which stands for further ones too, -1 and 0
    bias[0, 1] = 5
    return query, key, {"relative_bias": bias, "relative_low": -2}


def picture(weights, words, heads):
    """Return the weights [1, heads, words, words] as SVG: the darker a cell, the greater. Hovering shows the number."""
    drawn, side = [], LEFT + CELL * len(words) + 20
    for h, head in enumerate(heads):
        drawn.append(f'<g transform="translate({side * h} 0)"><text x="{LEFT}" y="16">{escape(head)}</text>')
        for i, word in enumerate(map(escape, words)):
            middle = CELL * i + 15
            drawn.append(f'<text x="{LEFT - 6}" y="{TOP + middle}" text-anchor="end">{word}</text>')
            drawn.append(f'<text transform="translate({LEFT + middle} {TOP - 6}) rotate(-60)">{word}</text>')
            for j, weight in enumerate(weights[0, h, i]):
                drawn.append(
                    f'<rect x="{LEFT + CELL * j}" y="{TOP + CELL * i}" width="{CELL - 1}" height="{CELL - 1}" '
                    f'fill-opacity="{0.04 + 0.96 * weight:.2f}">'
                    f"<title>{word} → {escape(words[j])}: {weight:.0%}</title></rect>"
                )
        drawn.append("</g>")
    size = f'width="{side * len(heads)}" height="{TOP + CELL * len(words) + 8}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} fill="currentColor" font-family="sans-serif" '
        f'font-size="12">{"".join(drawn)}</svg>\n'
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("weights.svg"))
    options = parser.parse_args()
    words, (query, key, terms) = [word for word, *_ in SENTENCE], queries_and_keys()
    terms |= {"causal": True, "softmax_scale": 1.0}
    options.out.write_text(
        picture(attnmask.attention_weights(query, key, **terms), words, HEADS), encoding="utf-8"
    )
    found = attnmask.attention_statistics(query, key, of=("top_keys", 1), **terms)
    for i, word in enumerate(words):
        keys, shares = found.top_keys[0, :2, i, 0], found.top_weights[0, :2, i, 0]
        print(
            f"{word:8}"
            + "".join(f"{words[k]:>10}{share:5.0%}" for k, share in zip(keys, shares, strict=True))
        )
    print(f"{options.out}: the map of {len(HEADS)} heads")


if __name__ == "__main__":
    main()
