"""Where a stream's key rows lie in the arena: pages of 48 positions, layer 3, KV head 1 of qwen3.5-tiny.

.venv/bin/python docs/examples/find_rows.py
"""

from refengine.lab.page_walk import PageWalk

LAYER, KEYS, KV_HEAD = 3, 0, 1
POSITIONS = (0, 31, 32, 47, 48, 50, 63)


def main() -> None:
    walk = PageWalk(page_size=48)
    print(f"page table {walk.table}, {walk.backend.page_words:,} words a page\n")
    print("position   entry   page   slot   word of the row")
    for position in POSITIONS:
        page, slot = walk.places[position]
        word = walk.word(LAYER, KEYS, position, KV_HEAD)
        print(f"{position:8}{position // walk.page_size:8}{page:7}{slot:7}{word:18,}")


if __name__ == "__main__":
    main()
