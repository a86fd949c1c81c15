"""The closed set of subjects that the demo model draws: the name in a caption, and the code point of its emoji."""

from collections.abc import Mapping

ANIMALS: Mapping[str, int] = {
    "dog": 0x1F436, "cat": 0x1F431, "rabbit": 0x1F430, "fox": 0x1F98A, "bear": 0x1F43B, "panda": 0x1F43C,
    "koala": 0x1F428, "tiger": 0x1F42F, "lion": 0x1F981, "pig": 0x1F437, "frog": 0x1F438, "penguin": 0x1F427,
    "owl": 0x1F989, "unicorn": 0x1F984, "butterfly": 0x1F98B, "snail": 0x1F40C, "octopus": 0x1F419,
    "fish": 0x1F420, "dolphin": 0x1F42C, "turtle": 0x1F422,
}  # fmt: skip
PLANTS: Mapping[str, int] = {
    "sunflower": 0x1F33B, "rose": 0x1F339, "tulip": 0x1F337, "cactus": 0x1F335, "pine tree": 0x1F332,
    "mushroom": 0x1F344,
}  # fmt: skip
FOOD: Mapping[str, int] = {
    "red apple": 0x1F34E, "green apple": 0x1F34F, "pear": 0x1F350, "orange": 0x1F34A, "lemon": 0x1F34B,
    "banana": 0x1F34C, "watermelon": 0x1F349, "strawberry": 0x1F353, "pineapple": 0x1F34D, "eggplant": 0x1F346,
    "carrot": 0x1F955, "hamburger": 0x1F354, "pizza": 0x1F355, "doughnut": 0x1F369, "cookie": 0x1F36A,
    "birthday cake": 0x1F382,
}  # fmt: skip
THINGS: Mapping[str, int] = {
    "sun": 0x1F31E, "star": 0x2B50, "rainbow": 0x1F308, "fire": 0x1F525, "heart": 0x2764, "balloon": 0x1F388,
    "pumpkin": 0x1F383, "soccer ball": 0x26BD, "basketball": 0x1F3C0, "rocket": 0x1F680, "car": 0x1F697,
    "bus": 0x1F68C, "house": 0x1F3E0, "light bulb": 0x1F4A1, "book": 0x1F4D5, "diamond": 0x1F48E, "crown": 0x1F451,
    "robot": 0x1F916, "ghost": 0x1F47B, "alien": 0x1F47D, "smiling face": 0x1F600, "sunglasses face": 0x1F60E,
}  # fmt: skip
SUBJECTS: Mapping[str, int] = {**ANIMALS, **PLANTS, **FOOD, **THINGS}

UNSEEN: Mapping[str, int] = {
    "dragon": 0x1F432, "blowfish": 0x1F421, "hamster": 0x1F439, "wolf": 0x1F43A, "hedgehog": 0x1F994,
    "fire engine": 0x1F692, "bicycle": 0x1F6B2, "castle": 0x1F3F0, "fried egg": 0x1F373, "clover": 0x1F340,
    "peach": 0x1F351, "trumpet": 0x1F3BA, "tennis racket": 0x1F3BE, "bread": 0x1F35E, "chicken": 0x1F414,
    "snake": 0x1F40D, "kiwi": 0x1F95D, "tomato": 0x1F345, "tractor": 0x1F69C, "lock": 0x1F512,
    "water drop": 0x1F4A7, "hot dog": 0x1F32D, "drum": 0x1F941, "broccoli": 0x1F966, "angry face": 0x1F621,
    "lollipop": 0x1F36D, "christmas tree": 0x1F384, "mouse": 0x1F42D, "cow": 0x1F42E, "monkey": 0x1F435,
    "chick": 0x1F424, "horse": 0x1F434, "bee": 0x1F41D, "ladybug": 0x1F41E, "crab": 0x1F980, "whale": 0x1F433,
    "shark": 0x1F988, "elephant": 0x1F418, "flamingo": 0x1F9A9, "dinosaur": 0x1F995, "palm tree": 0x1F334,
    "maple leaf": 0x1F341, "cherries": 0x1F352, "grapes": 0x1F347, "avocado": 0x1F951, "corn": 0x1F33D,
    "croissant": 0x1F950, "cheese": 0x1F9C0, "french fries": 0x1F35F, "cupcake": 0x1F9C1, "ice cream": 0x1F366,
    "moon": 0x1F31D, "snowman": 0x26C4, "gift": 0x1F381, "guitar": 0x1F3B8, "sailboat": 0x26F5, "umbrella": 0x2614,
    "key": 0x1F511, "alarm clock": 0x23F0, "top hat": 0x1F3A9, "trophy": 0x1F3C6, "clown": 0x1F921,
    "earth": 0x1F30D,
}  # fmt: skip
"""Training images of the VAE only, not of the denoiser."""
