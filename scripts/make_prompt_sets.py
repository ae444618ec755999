"""Writes the prompt sets of the rewards `ocr` and `geneval` to solrl_jax/assets/prompt_sets.

    python scripts/make_prompt_sets.py

* ocr-train.txt, ocr-test.txt: places that show a text in double quotes. No text is in both sets.
* geneval-shapes-train.jsonl, geneval-shapes-test.jsonl: captions of the embedded world with
  GenEval's metadata. Test captions are held out from the pretraining of the embedded pipelines
  (`drawing.held_out`).
"""

import argparse
import json
import random
from pathlib import Path

import numpy as np
from pretrain import drawing

from solrl_jax.data.shapes import scenes
from solrl_jax.storage.files import atomic_write

FOLDER = Path(__file__).parents[1] / "solrl_jax" / "assets" / "prompt_sets"
# Sizes of the sets.
COUNTS = {"train": 360, "test": 48}  # ocr
SHAPES = {"train": 256, "test": 26}  # geneval-shapes, as in `embedded:shapes-train` and `-test`

PLACES = (
    "a wooden sign beside a mountain trail that says {}",
    "a neon sign in the window of a diner, glowing {}",
    "a chalkboard in front of a small bakery with {} written on it",
    "the cover of an old clothbound book titled {}",
    "a paper label on a glass jar, hand-lettered {}",
    "a white delivery van with {} painted on its side",
    "a brass plate on a green door, engraved {}",
    "a birthday cake with {} in blue icing",
    "a knitted scarf with the word pattern {}",
    "a concert poster on a brick wall that announces {}",
    "a ship's bow in harbour light, its name {} in block letters",
    "a robot holding a cardboard sheet with {} on it",
    "a ticket on a marble table, stamped {}",
    "a shop awning in the rain that reads {}",
    "a computer screen in a dark office showing {} in large type",
    "a coffee mug on a windowsill, printed with {}",
    "a classroom blackboard on which a teacher has written {}",
    "footprints on a beach beside the letters {} drawn in the sand",
    "a red enamel street sign, {}, on a corner house",
    "a hot-air balloon over fields with {} across its envelope",
    "a museum banner between stone columns saying {}",
    "a cat wearing a collar whose tag spells {}",
    "a rusty water tower above a town, lettered {}",
    "a vintage postcard with {} across a picture of a lake",
)
FIRST = (
    *(
        "Amber",
        "Arctic",
        "Bright",
        "Broken",
        "Cedar",
        "Copper",
        "Distant",
        "Early",
        "Ember",
        "Frozen",
        "Gentle",
        "Golden",
    ),
    *(
        "Hidden",
        "Hollow",
        "Honest",
        "Indigo",
        "Ivory",
        "Last",
        "Little",
        "Lucky",
        "Marble",
        "Midnight",
        "Misty",
        "North",
    ),
    *(
        "Old",
        "Orchard",
        "Paper",
        "Quiet",
        "Rapid",
        "Silver",
        "Slow",
        "Summer",
        "Velvet",
        "Wandering",
        "Wild",
        "Winter",
    ),
)
SECOND = (
    *(
        "Anchor",
        "Bakery",
        "Bridge",
        "Canyon",
        "Comet",
        "Corner",
        "Engine",
        "Falcon",
        "Ferry",
        "Forest",
        "Garden",
        "Gate",
    ),
    *(
        "Harbour",
        "Hotel",
        "Island",
        "Journey",
        "Kettle",
        "Lantern",
        "Library",
        "Market",
        "Meadow",
        "Mirror",
        "Museum",
        "Ocean",
    ),
    *(
        "Parade",
        "Piano",
        "Planet",
        "River",
        "Rocket",
        "School",
        "Shadow",
        "Signal",
        "Studio",
        "Theatre",
        "Valley",
        "Window",
    ),
)
PHRASES = (
    "{second}",
    "{first}",
    "{first} {second}",
    "The {first} {second}",
    "{second} No {number}",
    "Open until {number}",
)


def ocr_prompts() -> dict[str, list[str]]:
    """Returns the prompts of each set, with distinct texts, in random order."""
    rng = random.Random(0)
    prompts: dict[str, list[str]] = {name: [] for name in COUNTS}
    used = set()
    for name, count in COUNTS.items():
        while len(prompts[name]) < count:
            parts = {
                "first": rng.choice(FIRST),
                "second": rng.choice(SECOND),
                "number": rng.randint(2, 99),
            }
            words = rng.choice(PHRASES).format(**parts)
            if words.lower() not in used:
                used.add(words.lower())
                prompts[name].append(rng.choice(PLACES).format(f'"{words}"'))
    return prompts


def geneval_shapes() -> dict[str, list[dict]]:
    """Returns captions with metadata for each set.

    Four of seven captions have one group of objects, the others two single objects of different
    shapes. The shapes differ because GenEval finds objects by class alone and expects each class
    where it was asked for.
    """
    sets = {}
    for name, count in SHAPES.items():
        held_out = name == "test"
        drawn = [
            scenes.parse_caption(text)
            for text in drawing.draw_prompts(
                np.random.default_rng((0, 5, held_out)), 12 * count, held_out
            )
        ]
        alone = [scene for scene in drawn if len(scene.groups) == 1]
        pairs = [
            scene
            for scene in drawn
            if len(scene.groups) == 2 and {g.count for g in scene.groups} == {1}
        ]
        pairs = [scene for scene in pairs if scene.groups[0].shape != scene.groups[1].shape]
        singles = min(len(alone), 4 * count // 7)
        chosen = {*alone[:singles], *pairs[: count - singles]}
        assert len(chosen) == count, name
        sets[name] = [line(scene) for scene in drawn if scene in chosen]
    return sets


def line(scene: scenes.Scene) -> dict:
    """Returns the caption of a scene with its GenEval metadata.

    Each group is a class, which includes the size if the caption names one.
    """
    clauses = [
        {
            "class": " ".join(filter(None, (group.size, group.shape))),
            "count": group.count,
            "color": group.color,
        }
        for group in reversed(scene.groups)
    ]
    tag = "colors" if scene.groups[0].count == 1 else "counting"
    if scene.relation:
        tag = "position"
        # The position of the first group relative to the second, which GenEval lists first.
        clauses[1]["position"] = [scene.relation, 0]
    return {"prompt": drawing.caption(scene), "tag": tag, "include": clauses}


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    for name, prompts in ocr_prompts().items():
        atomic_write(FOLDER / f"ocr-{name}.txt", "".join(f"{prompt}\n" for prompt in prompts))
    for name, lines in geneval_shapes().items():
        atomic_write(
            FOLDER / f"geneval-shapes-{name}.jsonl",
            "".join(json.dumps(one) + "\n" for one in lines),
        )


if __name__ == "__main__":
    main()
