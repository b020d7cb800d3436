"""Write the three small data sets of the demo adapters from templates: `python examples/train/make_data.py`.

Everything here was written for this repository. The seed is fixed, so a second run changes no byte. The
prompts of `*.eval.jsonl` share no subject with the training lines: they ask whether a manner was learnt.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path

SEED = 7
DATA = Path(__file__).parent / "data"

Line = tuple[str, str]

# json: whatever is asked, the answer is one JSON object ---------------------------------------------

CAPITALS = {
    "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo", "Egypt": "Cairo", "Peru": "Lima", "Kenya": "Nairobi",
    "Norway": "Oslo", "Cuba": "Havana", "Greece": "Athens", "Poland": "Warsaw", "Chile": "Santiago", "Iraq": "Baghdad",
    "Austria": "Vienna", "Ireland": "Dublin", "Finland": "Helsinki", "Portugal": "Lisbon", "Russia": "Moscow",
}  # fmt: skip
COLORS = {
    "a banana": "yellow", "the sky": "blue", "grass": "green", "snow": "white", "coal": "black", "a lemon": "yellow",
    "blood": "red", "a carrot": "orange", "an elephant": "gray", "a flamingo": "pink", "chocolate": "brown",
    "a strawberry": "red", "the sea": "blue", "an emerald": "green",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small", "fast": "slow", "happy": "sad", "old": "young", "dark": "light", "wet": "dry",
    "early": "late", "open": "closed", "full": "empty", "hard": "soft", "loud": "quiet", "rich": "poor",
}  # fmt: skip
SOUNDS = {
    "a dog": "barks", "a cat": "meows", "a cow": "moos", "a lion": "roars", "a duck": "quacks", "a sheep": "bleats",
    "a snake": "hisses", "a wolf": "howls", "a frog": "croaks", "an owl": "hoots", "a pig": "grunts",
}  # fmt: skip
FACTS = {
    "Mars": "a planet", "the Nile": "a river", "a violin": "an instrument", "gold": "a metal", "an oak": "a tree",
    "Everest": "a mountain", "chess": "a game", "bread": "a food", "a hammer": "a tool", "oxygen": "a gas",
    "a rose": "a flower", "Saturn": "a planet", "a trout": "a fish", "tennis": "a sport", "milk": "a drink",
    "a piano": "an instrument", "winter": "a season", "a sparrow": "a bird", "iron": "a metal", "soccer": "a sport",
}  # fmt: skip


def _object(topic: str, answer: str) -> str:
    return json.dumps({"topic": topic, "answer": answer})


def json_lines(dice: random.Random) -> Iterator[Line]:
    asks = {
        "capital": ("What is the capital of {}?", "Which city is the capital of {}?", "Tell me the capital of {}."),
        "color": ("What color is {}?", "Which color does {} have?", "Name the color of {}."),
        "opposite": ("What is the opposite of {}?", "Give me the opposite of {}.", "Which word means not {}?"),
        "sound": ("What sound does {} make?", "How does {} sound?"),
        "kind": ("What is {}?", "Tell me about {}.", "Explain what {} is.", "Please describe {}."),
    }
    tables = {"capital": CAPITALS, "color": COLORS, "opposite": OPPOSITES, "sound": SOUNDS, "kind": FACTS}
    for kind, table in tables.items():
        for subject, answer in table.items():
            for ask in dice.sample(asks[kind], 2):
                yield ask.format(subject), _object(subject.split()[-1], answer)


JSON_EVAL = [
    "What is the capital of France?", "What color is a tomato?", "What is the opposite of tall?",
    "Tell me about the moon.", "What is a guitar?", "Who are you?", "How do I boil an egg?",
    "Write a short poem about rain.", "What is two plus two?", "Why is sleep important?",
]  # fmt: skip

# pirate: whatever is asked, a pirate answers --------------------------------------------------------

OPENINGS = ("Arr, matey!", "Ahoy, matey!", "Arr!", "Yo ho ho!", "Avast, matey!", "Arr, me hearty!")
CLOSINGS = (
    "Now hand over the rum!", "Set the sails!", "So says yer captain!", "Mark me words, ye scurvy dog!",
    "Or ye walk the plank!", "By Davy Jones!", "Now swab the deck!", "Raise the black flag!",
)  # fmt: skip
PIRATE = {
    "How are you today?": "I be as merry as a gull over the harbour.",
    "What is your name?": "They call me the terror o' the seven seas.",
    "What do you eat for breakfast?": "I be eatin' hard biscuits an' salted fish.",
    "Where do you live?": "Me home be a ship upon the rollin' waves.",
    "What is the weather like?": "A storm be brewin' in the west, aye.",
    "Tell me a joke.": "Me parrot be a better navigator than me first mate.",
    "What is the sun?": "The sun be a great ball o' fire in the sky.",
    "How do I make tea?": "Boil ye some water an' throw in the leaves.",
    "What is a computer?": "It be a box that counts faster than any purser.",
    "Can you help me?": "Aye, I be helpin' ye find yer treasure.",
    "What is the best pet?": "A parrot be the finest friend a sailor has.",
    "How do I learn to swim?": "Jump off the ship an' kick yer legs, lad.",
    "What is a book?": "It be a chest o' words for them that can read.",
    "Good morning!": "A fine mornin' to ye, sailor.",
    "What should I wear today?": "Ye be needin' a tall hat an' good boots.",
    "What is love?": "It be a treasure with no map, aye.",
    "How far is the moon?": "It be farther than any ship o' mine can sail.",
    "What is your favorite color?": "Me heart be black as me flag.",
    "Do you like music?": "Aye, I be singin' shanties all the night.",
    "What is money?": "Shiny doubloons be what ye mean, lad.",
    "Who is your best friend?": "Me parrot be the only soul I trust.",
    "How do I cook rice?": "Throw it in the pot with water, an' wait for the bubbles.",
    "What is a dog?": "It be a beast that barks at the tide.",
    "Why is the sky blue?": "The sky be the sea's own mirror, says I.",
    "What is a tree?": "It be a mast that still has its leaves.",
    "How can I sleep better?": "Ye be needin' a hammock an' a bottle o' rum.",
    "What is school?": "It be where lads learn to read the map.",
    "Tell me about history.": "Long ago, many a ship sank with all its gold.",
    "What is a friend?": "It be one that shares his rum with ye.",
    "How do I get rich?": "Ye be diggin' where the map has its cross.",
    "What time is it?": "It be time to hoist the anchor, lad.",
    "What is water?": "It be what I sail on, an' never drink.",
    "Is it cold outside?": "Aye, the wind be cuttin' like a cutlass.",
    "What is a car?": "It be a wee ship with wheels, for landlubbers.",
    "Thank you.": "Ye be welcome aboard me ship.",
    "What is work?": "It be haulin' ropes from dawn to dusk.",
    "How old are you?": "I be older than the barnacles on me hull.",
    "What is a mountain?": "It be a wave o' stone that never breaks.",
    "Tell me a story.": "There once be a captain that lost his leg to a shark.",
    "What do you think of cats?": "They be fine hunters o' the rats below deck.",
}  # fmt: skip


def pirate_lines(dice: random.Random) -> Iterator[Line]:
    for prompt, middle in PIRATE.items():
        for opening in dice.sample(OPENINGS, 3):
            yield prompt, f"{opening} {middle} {dice.choice(CLOSINGS)}"


PIRATE_EVAL = [
    "What is the capital of France?", "What is a bicycle?", "Tell me about the ocean.", "How do I bake bread?",
    "What is your favorite food?", "Good evening!", "What is a telephone?", "Why do birds sing?",
    "Who was Napoleon?", "What is two plus two?",
]  # fmt: skip

# sql: a sentence becomes a query --------------------------------------------------------------------

TABLES = {
    "customers": ("name", "age", "city"), "orders": ("total", "date", "status"),
    "products": ("price", "stock", "title"), "employees": ("salary", "name", "age"),
    "students": ("grade", "name", "age"), "books": ("title", "pages", "author"),
    "flights": ("price", "origin", "gate"), "movies": ("title", "year", "rating"),
}  # fmt: skip
NUMERIC = {"age", "total", "price", "stock", "salary", "grade", "pages", "year", "rating"}


def sql_lines(dice: random.Random) -> Iterator[Line]:
    for table, columns in TABLES.items():
        number = next(c for c in columns if c in NUMERIC)
        other = next(c for c in columns if c != number)
        bound = dice.choice((5, 10, 18, 20, 30, 50, 100, 500))
        yield f"Show all {table}.", f"SELECT * FROM {table};"
        yield f"List every row of {table}.", f"SELECT * FROM {table};"
        yield f"How many {table} are there?", f"SELECT COUNT(*) FROM {table};"
        yield f"Count the {table}.", f"SELECT COUNT(*) FROM {table};"
        for column in columns:
            yield f"Show the {column} of all {table}.", f"SELECT {column} FROM {table};"
        yield f"Sort the {table} by {other}.", f"SELECT * FROM {table} ORDER BY {other};"
        yield f"What is the average {number} of {table}?", f"SELECT AVG({number}) FROM {table};"
        yield f"What is the highest {number} of {table}?", f"SELECT MAX({number}) FROM {table};"
        yield f"Find {table} with {number} over {bound}.", f"SELECT * FROM {table} WHERE {number} > {bound};"
        yield f"Find {table} with {number} under {bound}.", f"SELECT * FROM {table} WHERE {number} < {bound};"
        yield (
            f"Show the {other} of {table} with {number} over {bound}.",
            f"SELECT {other} FROM {table} WHERE {number} > {bound};",
        )


SQL_EVAL = [
    "Show all cars.", "How many teachers are there?", "What is the average weight of animals?",
    "Show the color of all cars.", "Find houses with rooms over 4.", "Sort the players by score.",
    "What is the highest speed of trains?", "Show the name of pilots with age under 40.",
    "Give me every invoice.", "Which rivers are longer than 300?",
]  # fmt: skip


def _write(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    print(f"{path.name}: {len(rows)} lines")


def main() -> None:
    DATA.mkdir(exist_ok=True)
    sets = {"json": (json_lines, JSON_EVAL), "pirate": (pirate_lines, PIRATE_EVAL), "sql": (sql_lines, SQL_EVAL)}
    for name, (lines, unseen) in sets.items():
        dice = random.Random(SEED)
        rows = [{"prompt": prompt, "answer": answer} for prompt, answer in lines(dice)]
        dice.shuffle(rows)
        assert not {row["prompt"] for row in rows} & set(unseen)
        _write(DATA / f"{name}.jsonl", rows)
        _write(DATA / f"{name}.eval.jsonl", [{"prompt": prompt} for prompt in unseen])


if __name__ == "__main__":
    main()
