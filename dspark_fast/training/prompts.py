"""Training prompts: a deterministic, varied stream of user requests for the target model to answer.

A drafter only learns to predict what it has seen, so the prompts cover six domains in a fixed proportion (see
`SHARES`). Every prompt is made from parts: the phrases and request forms of `prompt_parts.json` (a small grammar), the
Python standard library's own functions, templated arithmetic, composed passages, and, when the file is given, the
training questions of GSM8K. Nothing is taken from public test sets, and `is_excluded` keeps a few demonstration
prompts out of the stream.

Each prompt is drawn with its own random generator, seeded by (seed, domain, attempt), so that a part which is missing
on one Python version changes only the prompts that use it.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

#: Prompts of each domain in every block of 50 consecutive prompts.
SHARES: dict[str, int] = {"math": 11, "code": 9, "chat": 15, "list": 6, "short": 5, "rewrite": 4}

#: Share of prompts kept for evaluation by `is_held_out`.
HELD_OUT_SHARE = 0.02

_PARTS_FILE = Path(__file__).with_name("prompt_parts.json")
_MAX_MISSES = 2000

#: Requests that stay unseen in training, and close relatives of them.
EXCLUSIONS: tuple[re.Pattern[str], ...] = tuple(
    re.compile(pattern, re.IGNORECASE | re.DOTALL)
    for pattern in (
        r"\btrains?\b.*\b60\s*(km|kilomet)",
        r"\b60\s*(km|kilomet).*\b(trains?\b|45\s*min)",
        r"palindrom",
        r"\bsky\b.{0,30}\bblue\b",
        r"\bblue\b.{0,15}\bsky\b",
        r"\bfruits?\b",
        r"\bcapital\b.{0,20}\bfrance\b",
        r"\bfrance'?s?\b.{0,20}\bcapital\b",
        r"\bfrench capital\b",
    )
)


@dataclass(frozen=True)
class Prompt:
    """One request: the messages so far (the last is the user's) and user turns to ask after the answers."""

    id: str
    domain: str
    messages: tuple[dict[str, str], ...]
    follow_ups: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Draft:
    """A drawn request before it becomes a `Prompt`."""

    text: str
    system: str | None = None
    follow_ups: tuple[str, ...] = ()


def _digest(messages: tuple[dict[str, str], ...]) -> str:
    canonical = json.dumps([[m["role"], m["content"]] for m in messages], ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def make_prompt(domain: str, messages: tuple[dict[str, str], ...], follow_ups: tuple[str, ...] = ()) -> Prompt:
    """Build a `Prompt` whose id is the domain and a short hash of the messages."""
    return Prompt(f"{domain}-{_digest(messages)[:16]}", domain, messages, follow_ups)


def is_held_out(prompt: Prompt) -> bool:
    """Whether the prompt belongs to the 2 % that are kept for evaluation; depends on its messages only."""
    number = int(hashlib.sha256(("held-out:" + _digest(prompt.messages)).encode()).hexdigest()[:12], 16)
    return number < HELD_OUT_SHARE * 16**12


def is_excluded(text: str) -> bool:
    """Whether the text is one of the demonstration prompts that stay unseen, or close to one."""
    return any(pattern.search(text) for pattern in EXCLUSIONS)


# ---------------------------------------------------------------------------------------------------------------------
# The grammar of prompt_parts.json


@lru_cache(maxsize=1)
def _parts() -> dict[str, list[str]]:
    return json.loads(_PARTS_FILE.read_text(encoding="utf-8"))


_SLOT = re.compile(r"\{([a-z_]+)(?:\.([a-z]+))?\}")


def _fill(rng: random.Random, template: str) -> str:
    """Replace every {name} by a random part of that name; {name.cap}, {name.low} and {name.a} adapt the phrase."""
    used: dict[str, list[str]] = {}

    def part(match: re.Match[str]) -> str:
        name, form = match.groups()
        before = used.setdefault(name, [])
        for _ in range(20):
            phrase = rng.choice(_parts()[name])
            if phrase not in before:
                break
        before.append(phrase)
        if form == "cap":
            phrase = phrase[:1].upper() + phrase[1:]
        elif form == "low":
            phrase = phrase[:1].lower() + phrase[1:]
        elif form == "a":
            phrase = ("an " if phrase[0] in "aeiou" else "a ") + phrase
        return phrase

    text = _SLOT.sub(part, template)
    text = text.replace("?.", "?").replace("!.", "!")
    text = re.sub(r"\b([Aa]) (?=[aeio])(?!one|eu)", r"\1n ", text)
    text = re.sub(r"(?<=! )[a-z]", lambda match: match.group().upper(), text)
    return text[:1].upper() + text[1:] if template.startswith("{n}") else text


def _draw(rng: random.Random, kinds: dict[str, float]) -> tuple[str, str]:
    """A template kind by weight and a filled template of that kind."""
    kind = rng.choices(list(kinds), list(kinds.values()))[0]
    return kind, _fill(rng, rng.choice(_parts()[kind]))


def _follow_ups(rng: random.Random, pool: list[str] | tuple[str, ...], share: float) -> tuple[str, ...]:
    if rng.random() >= share:
        return ()
    return tuple(rng.sample(list(pool), 2 if rng.random() < 0.25 else 1))


# ---------------------------------------------------------------------------------------------------------------------
# chat, list, short

_CHAT_KINDS: dict[str, float] = {
    "chat_explain": 18, "chat_clause": 9, "chat_howto": 13, "chat_advice": 7, "chat_opinion": 9, "chat_compare": 4,
    "chat_story": 11, "chat_poem": 5, "chat_email": 6, "chat_role": 7, "chat_small": 4, "chat_describe": 5,
    "chat_food": 3, "chat_travel": 4,
}  # fmt: skip
_CHAT_FOLLOW: dict[str, str] = {
    "chat_explain": "more_explain", "chat_clause": "more_explain", "chat_compare": "more_explain",
    "chat_howto": "more_help", "chat_advice": "more_help", "chat_food": "more_help", "chat_travel": "more_help",
    "chat_opinion": "more_talk", "chat_role": "more_talk", "chat_small": "more_talk",
    "chat_story": "more_write", "chat_poem": "more_write", "chat_email": "more_write", "chat_describe": "more_write",
}  # fmt: skip


def _casual(rng: random.Random, text: str) -> str:
    """Now and then, type the request the way people type in a hurry."""
    roll = rng.random()
    if roll < 0.04:
        return text[:1].lower() + text[1:].rstrip(".?")
    if roll < 0.06:
        return text.lower()
    if roll < 0.08:
        return text.rstrip(".") + (" Thanks!" if text.endswith(("?", "!")) else ". Thanks!")
    return text


def _chat(rng: random.Random) -> _Draft:
    kind, text = _draw(rng, _CHAT_KINDS)
    follow_ups = _follow_ups(rng, _parts()[_CHAT_FOLLOW[kind]], 0.15)
    # The role-play templates bring their own persona; a system message would only contradict it.
    system = rng.choice(_parts()["system"]) if kind != "chat_role" and rng.random() < 0.06 else None
    return _Draft(_casual(rng, text), system, follow_ups)


_LIST_FOLLOW = (
    "Give me three more.", "Which one is the most important?", "Sort them alphabetically.", "Now as a table.",
    "Explain the first one.", "Shorten each item to a few words.", "Remove the least useful one and say why.",
    "Turn the list into a paragraph.",
)  # fmt: skip


def _list(rng: random.Random) -> _Draft:
    _, text = _draw(rng, {"list_items": 5, "list_other": 5})
    return _Draft(_casual(rng, text), None, _follow_ups(rng, _LIST_FOLLOW, 0.06))


def _short_numbers(rng: random.Random) -> str:
    """Conversions, spelling and tiny questions with numbers."""
    n = rng.randint(2, 99)
    unit_a, unit_b = rng.choice(
        (
            ("kilometres", "miles"), ("miles", "kilometres"), ("kilograms", "pounds"), ("pounds", "kilograms"),
            ("litres", "cups"), ("inches", "centimetres"), ("feet", "metres"), ("hours", "minutes"),
            ("minutes", "seconds"), ("weeks", "days"), ("metres", "feet"), ("gigabytes", "megabytes"),
            ("degrees Celsius", "Fahrenheit"), ("degrees Fahrenheit", "Celsius"), ("years", "months"),
        )
    )  # fmt: skip
    month = rng.choice(("January", "March", "April", "June", "August", "September", "October", "December"))
    day = rng.choice(("Monday", "Tuesday", "Thursday", "Friday", "Saturday"))
    words = rng.sample(("apple", "chair", "river", "lamp", "zebra", "cloud", "brick", "melon", "tiger", "spoon"), 4)
    return rng.choice(
        (
            f"How many {unit_b} are {n} {unit_a}?",
            f"Convert {n} {unit_a} to {unit_b}.",
            f"{n} {unit_a} in {unit_b}?",
            f"Write the number {n * 13} in words.",
            f"What is {n} in Roman numerals?",
            f"What is {n} in binary?",
            f"What is {n} plus {rng.randint(2, 99)}? Just the number.",
            f"Is {n * 3 + 1} divisible by 7? Yes or no.",
            f"Which is larger, {n}/{n + 3} or {n + 1}/{n + 5}?",
            f"If today is {day}, what day is it in {n} days?",
            f"Which date comes {n % 27 + 2} days after {month} {n % 25 + 1}?",
            f"Put these words in alphabetical order: {', '.join(words)}.",
            f"Which word does not belong: {', '.join(words[:3])}, {rng.choice(('run', 'green', 'seventeen', 'why'))}?",
            f"Round {n * 1.37:.2f} to the nearest whole number.",
        )
    )


_SENTIMENT = (
    ("The {x} was excellent", "and I would come back tomorrow."),
    ("The {x} was a disappointment", "and nobody apologised."),
    ("I expected more from the {x},", "but it was okay for the price."),
    ("The {x} was nothing like the description", "and I want my money back."),
    ("My family loved the {x},", "although it was a little expensive."),
    ("I'm not sure about the {x}:", "it's fine, I suppose."),
    ("Never again will I pay for a {x} like this,", "what a waste of an afternoon."),
    ("What a wonderful {x},", "I told all my friends about it!"),
    ("The {x} was neither good nor bad,", "just average."),
)


def _short_label(rng: random.Random) -> str:
    """One-word classification of a sentence."""
    start, end = rng.choice(_SENTIMENT)
    thing = rng.choice(("hotel", "vacuum cleaner", "restaurant", "laptop", "film", "concert", "backpack", "guided tour",
                        "kettle", "book", "train ride", "massage", "headset", "pizza", "printer"))  # fmt: skip
    sentence = f"{start.format(x=thing)} {end}"
    return rng.choice(
        (
            f'Is this review positive, negative or neutral? "{sentence}"',
            f'Classify the sentiment in one word: "{sentence}"',
            f"{sentence}\n\nSentiment of the text above (positive/negative/neutral)?",
            f'How does the writer feel? Answer in one sentence. "{sentence}"',
        )
    )


def _short(rng: random.Random) -> _Draft:
    kinds = {
        "short_country": 14, "short_translate": 18, "short_word": 14, "short_yesno": 7, "short_fact": 10,
        "short_one": 24, "numbers": 15, "label": 5,
    }  # fmt: skip
    kind = rng.choices(list(kinds), list(kinds.values()))[0]
    if kind == "numbers":
        text = _short_numbers(rng)
    elif kind == "label":
        text = _short_label(rng)
    else:
        text = _fill(rng, rng.choice(_parts()[kind]))
    system = "Answer in as few words as possible." if rng.random() < 0.03 else None
    return _Draft(_casual(rng, text), system)


# ---------------------------------------------------------------------------------------------------------------------
# math

_NAMES = (
    "Ana", "Ben", "Chloe", "David", "Elif", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Kofi", "Lena", "Mateo", "Nora",
    "Omar", "Priya", "Quinn", "Rosa", "Sam", "Tariq", "Uma", "Victor", "Wei", "Yuki", "Zoe", "Lucas", "Maya", "Ivan",
    "Aisha", "Peter", "Sofia", "Tom", "Hannah", "Diego", "Freya", "Olga", "Ravi", "Nina", "Carl", "Amara",
)  # fmt: skip
_GOODS = (
    "pencils", "notebooks", "marbles", "stickers", "cookies", "tickets", "postcards", "candles", "muffins", "chairs",
    "batteries", "flower pots", "T-shirts", "mugs", "light bulbs", "eggs", "sandwiches", "books", "badges", "keyrings",
)  # fmt: skip
_HOW = (
    "", "", "", "", "", "", " Think step by step.", " Show your work.", " Let's solve this step by step.",
    " Explain each step.", " Give only the final answer.", " Please explain your reasoning.",
    " Show your calculation and then state the answer.", "\nPut the final answer on the last line.",
)  # fmt: skip
_MATH_FOLLOW = (
    "Can you check your answer?", "Explain it in a simpler way.", "What if the first number were twice as large?",
    "Now write it as a single equation.", "Give me a similar problem to practise.", "Why did you do the first step?",
    "Are you sure?",
)  # fmt: skip


def _arithmetic(rng: random.Random) -> str:
    a, b, c = rng.randint(2, 999), rng.randint(2, 99), rng.randint(2, 60)
    expression = rng.choice(
        (
            f"{a} + {b}", f"{a} - {b}", f"{b} * {c}", f"{b * c} / {c}", f"{a} + {b} * {c}",
            f"({a} - {b}) * {c % 9 + 2}", f"{a} x {c}", f"{b}^2", f"{c % 9 + 2}^{b % 4 + 2}",
            f"{a / 10} + {b / 100}", f"{b / 10} * {c % 9 + 2}",
            f"{c % 11 + 1}/{c % 11 + 4} + {b % 7 + 1}/{b % 7 + 3}", f"{c % 5 + 1}/{c % 5 + 3} * {b % 8 + 2}",
            f"{-c} + {b}", f"{b} - {a}", f"({b} + {c}) / {c % 7 + 2}",
        )
    )  # fmt: skip
    form = rng.choice(
        (
            "What is {}?", "Calculate {}.", "Compute {} and explain how you did it.", "{} = ?", "Work out {}.",
            "Evaluate {} step by step.", "How much is {}?", "Can you solve {} for me?",
        )
    )  # fmt: skip
    return form.format(expression)


def _algebra(rng: random.Random) -> str:
    a, x, b, c = rng.randint(2, 12), rng.randint(-9, 15), rng.randint(1, 40), rng.randint(2, 9)
    sign = "+" if rng.random() < 0.5 else "-"
    right = a * x + (b if sign == "+" else -b)
    p, q = rng.randint(1, 9), rng.randint(1, 9)
    return rng.choice(
        (
            f"Solve for x: {a}x {sign} {b} = {right}.",
            f"Find x if {a}(x + {c}) = {a * (x + c)}.",
            f"Solve the equation x^2 - {p + q}x + {p * q} = 0.",
            f"Factor x^2 + {p + q}x + {p * q}.",
            f"Expand ({a}x + {c})(x - {p}).",
            f"Simplify {a}x + {b} - {c}x + {p}.",
            f"If f(x) = {a}x^2 - {b}x + {c}, what is f({p})?",
            f"What is the derivative of {a}x^{c} + {b}x?",
            f"Find the slope of the line through ({p}, {b}) and ({p + c}, {b + a * c}).",
            f"Solve the system: x + y = {p + q + 10}, x - y = {abs(p - q)}.",
            f"What is the next number in the sequence {p}, {p + a}, {p + 2 * a}, {p + 3 * a}, ...?",
            f"Find the {b}th term of the arithmetic sequence that starts {p}, {p + a}, {p + 2 * a}."
            if b > 13 and b % 10 not in (1, 2, 3) else f"What is the sum of the first {b + 5} positive integers?",
            f"Solve the inequality {a}x - {b} > {c}.",
            f"What is the greatest common divisor of {a * c * 2} and {a * q * 3}?",
            f"What is the least common multiple of {a} and {b}?",
            f"What is the prime factorisation of {a * b * c}?",
        )
    )  # fmt: skip


def _geometry(rng: random.Random) -> str:
    a, b, c = rng.randint(2, 40), rng.randint(2, 40), rng.randint(2, 20)
    unit = rng.choice(("cm", "m", "inches", "feet", "mm"))
    angle = rng.randint(20, 85)
    return rng.choice(
        (
            f"What is the area of a rectangle that is {a} {unit} long and {b} {unit} wide?",
            f"A square has a perimeter of {4 * a} {unit}. What is its area?",
            f"Find the circumference of a circle with a radius of {a} {unit}.",
            f"What is the area of a circle with a diameter of {2 * a} {unit}?",
            f"A triangle has a base of {a} {unit} and a height of {b} {unit}. What is its area?",
            f"Two angles of a triangle measure {angle} and {angle // 2 + 20} degrees. How large is the third?",
            f"A right triangle has legs of {3 * c} {unit} and {4 * c} {unit}. How long is the hypotenuse?",
            f"What is the volume of a box that measures {a} by {b} by {c} {unit}?",
            f"A cylinder has a radius of {c} {unit} and a height of {a} {unit}. What is its volume?",
            f"A cube has edges of {c} {unit}. What are its volume and its surface area?",
            f"A garden {a + 5} m long and {b + 3} m wide has a path 1 m wide around it. What is the area of the path?",
            f"How many square tiles with a side of {c * 5} cm are needed to cover a floor of {c} m by {c * 2} m?",
            f"A trapezoid has parallel sides of {a} {unit} and {a + b} {unit} and is {c} {unit} high. Find its area.",
            f"What is the sum of the interior angles of a polygon with {c + 3} sides?",
        )
    )


def _word_problem(rng: random.Random) -> str:
    name, other = rng.sample(_NAMES, 2)
    goods, more = rng.sample(_GOODS, 2)
    a, b, c, d = rng.randint(12, 98), rng.randint(2, 11), rng.randint(3, 25), rng.randint(2, 9)
    price, percent = rng.choice((1.5, 2, 2.25, 3, 4.5, 5, 6, 7.5, 12)), rng.choice((5, 10, 15, 20, 25, 30, 40, 60))
    money = f"${price:.2f}" if price % 1 else f"${price:.0f}"
    vehicle = rng.choice(("car", "bus", "coach", "lorry", "van", "motorbike"))
    sample = ", ".join(str(rng.randint(1, 60)) for _ in range(d + 3))
    worker = rng.choice(("baker", "carpenter", "tailor", "gardener", "potter", "printer"))
    return rng.choice(
        (
            f"{name} has {a} {goods} and gives {b} of them to {other}. Then {name} buys {c} more. "
            f"How many {goods} does {name} have now?",
            f"{name} buys {b} {goods} for {money} each and pays with a $100 bill. How much change does {name} get?",
            f"A shop sells {goods} at {money} each. On Saturday it sold {a} and on Sunday {c} more than on Saturday. "
            f"How much money did it take in over the weekend?",
            f"{name} reads {c} pages a day. How many days does it take to read a book of {c * a} pages?",
            f"{name} is {d} times as old as {other}. Together they are {(d + 1) * b} years old. How old is {other}?",
            f"A jacket costs ${a + 20}. It is reduced by {percent}%. What is the new price?",
            f"The price of {goods} rose from ${a} to ${a + c} per box. What is the percentage increase?",
            f"{name} earns ${c + 8} an hour and works {b + 4} hours a day, five days a week. "
            f"How much does {name} earn in {d} weeks?",
            f"A {vehicle} covers {a * d} miles in {d} hours. How far does it get in {b + 1} hours at the same speed?",
            f"A {vehicle} leaves at 9:{c + 10} and arrives {a + 60} minutes later. What time does it arrive?",
            f"There are {a} {goods} in a box. {percent}% of them are broken. About how many are still good?",
            f"A {worker} makes {b} {goods} per hour. How long does it take {d} equally fast {worker}s to make "
            f"{b * d * 6} {goods}?",
            f"{name} wants to share {a * 2} {goods} equally among {b} friends. How many does each friend get, and how "
            f"many are left over?",
            f"A recipe for {d * 2} people needs {a * 10} g of flour. How much flour is needed for {d * 2 + b} people?",
            f"In a class of {c + 22} students, {b + d} play chess, {d + 3} sing in the choir and {d - 1} do both. "
            f"How many do neither?",
            f"A tank holds {a * 10} litres. A pipe adds {c + 10} litres per minute and a leak loses {d} litres per "
            f"minute. How long does it take to fill the empty tank?",
            f"{name} saves ${c} every week. After how many weeks does {name} have at least ${a * 5}?",
            f"{name} invests ${a * 100} at {d}% interest per year. How much money is there after {b} years with "
            f"compound interest?",
            f"The mean of {d + 1} numbers is {c}. When another number is added, the mean becomes {c + 1}. "
            f"What is the new number?",
            f"A bag contains {b} red, {d} blue and {c} green {goods}. What is the probability of drawing a blue one?",
            f"How many ways are there to choose {d % 3 + 2} of {b + 4} {goods}?",
            f"{name} has twice as many {goods} as {more}. In total there are {a * 3} items. How many {more} are there?",
            f"The ratio of {goods} to {more} in a store is {d}:{d + 1}. There are {d * c} {goods}. How many {more} are "
            f"there?",
            f"{name} runs {b + 0.5} km on Monday, {d} km on Wednesday and twice Monday's distance on Saturday. "
            f"How far does {name} run in total?",
            f"A phone plan costs ${c + 5} a month plus {d} cents per text message. {name} sent {a} messages. "
            f"What is the bill?",
            f"{other} bought a bike for ${a * 3} and sold it for ${a * 3 + c * 2}. What was the profit in percent?",
            f"Find the median and the mean of these numbers: {sample}.",
            f"What is {percent}% of {a * b}?",
            f"{a} is what percent of {a * d}?",
            f"Convert {a * c} grams to kilograms.",
            f"How many seconds are there in {b} hours and {c} minutes?",
            f"Convert {a} miles per hour to kilometres per hour.",
        )
    )  # fmt: skip


def _math(rng: random.Random) -> _Draft:
    maker = rng.choices((_arithmetic, _algebra, _geometry, _word_problem), (15, 22, 15, 48))[0]
    text = maker(rng)
    if maker is not _arithmetic:
        text += rng.choice(_HOW)
    return _Draft(text, None, _follow_ups(rng, _MATH_FOLLOW, 0.05))


def _gsm8k_questions(path: Path) -> list[str]:
    """The questions of GSM8K's training file."""
    return [prompt.messages[-1]["content"] for prompt in read_prompts(path)]


# ---------------------------------------------------------------------------------------------------------------------
# code

_STDLIB: dict[str, str] = {
    "itertools": "chain groupby product permutations combinations accumulate islice zip_longest cycle takewhile "
    "dropwhile starmap compress count repeat tee",
    "collections": "Counter defaultdict deque OrderedDict namedtuple ChainMap",
    "functools": "reduce partial lru_cache wraps cmp_to_key total_ordering singledispatch cached_property",
    "textwrap": "fill wrap dedent indent shorten",
    "string": "capwords Template",
    "statistics": "mean median mode stdev variance quantiles harmonic_mean geometric_mean",
    "math": "gcd factorial isqrt hypot floor ceil comb prod log sqrt isclose dist degrees radians fsum trunc",
    "datetime": "date datetime timedelta timezone",
    "json": "dumps loads dump load",
    "re": "sub findall match search split fullmatch compile escape finditer",
    "random": "choice sample shuffle randint uniform choices gauss seed",
    "heapq": "heappush heappop heapify nlargest nsmallest merge",
    "bisect": "bisect_left bisect_right insort",
    "pathlib": "Path PurePath",
    "csv": "reader writer DictReader DictWriter",
    "os": "listdir walk getenv makedirs rename remove getcwd",
    "shutil": "copy move rmtree copytree which disk_usage",
    "glob": "glob iglob",
    "fnmatch": "fnmatch filter translate",
    "hashlib": "sha256 md5 new",
    "base64": "b64encode b64decode urlsafe_b64encode",
    "calendar": "monthrange isleap month_name monthcalendar",
    "time": "sleep perf_counter strftime time monotonic",
    "decimal": "Decimal getcontext",
    "fractions": "Fraction",
    "operator": "itemgetter attrgetter methodcaller mul",
    "copy": "copy deepcopy",
    "enum": "Enum IntEnum auto Flag",
    "dataclasses": "dataclass field asdict replace",
    "contextlib": "contextmanager suppress closing redirect_stdout ExitStack",
    "urllib.parse": "urlparse urlencode quote urljoin parse_qs",
    "tempfile": "TemporaryDirectory NamedTemporaryFile mkstemp",
    "logging": "basicConfig getLogger info warning",
    "argparse": "ArgumentParser Namespace",
    "subprocess": "run Popen check_output",
    "threading": "Thread Lock Event Timer",
    "queue": "Queue PriorityQueue",
    "asyncio": "gather sleep run create_task wait_for",
    "sqlite3": "connect Row",
    "zipfile": "ZipFile is_zipfile",
    "struct": "pack unpack calcsize",
    "html": "escape unescape",
    "difflib": "unified_diff get_close_matches SequenceMatcher ndiff",
    "secrets": "token_hex choice randbelow",
    "unicodedata": "normalize category name",
    "inspect": "signature getdoc getsource",
    "uuid": "uuid4 UUID",
    "pprint": "pprint pformat",
    "builtins": "zip enumerate sorted map filter any all sum reversed isinstance getattr open range max min print "
    "iter next super property staticmethod classmethod",
    "str": "split join strip replace title format startswith casefold partition zfill center translate rjust count",
    "list": "append extend insert pop sort reverse index copy",
    "dict": "get items setdefault update pop fromkeys keys",
    "set": "union intersection difference add issubset symmetric_difference",
}

_STDLIB_FORMS = (
    "Explain what `{f}` does and show an example.", "What does `{f}` do in Python?", "How do I use `{f}` in Python?",
    "Show three short examples of `{f}`.", "Write a Python function that uses `{f}`.", "When should I use `{f}`?",
    "Write a unit test for a function that calls `{f}`.", "What are common mistakes when using `{f}`?",
    "Write a simple Python version of `{f}` from scratch.", "Reimplement `{f}` without importing the module.",
    "What is the difference between `{f}` and `{g}`?", "Explain `{f}` to a beginner in a few sentences.",
    "What happens if I call `{f}` with an empty argument?", "Give me a real-world example where `{f}` is useful.",
    "Write a docstring for a wrapper around `{f}`.", "python {f} example", "Write a short tutorial about `{f}`.",
    "Is there an alternative to `{f}`?", "Write a small script that combines `{f}` and `{g}`.",
    "What does `{f}` return? Answer briefly.", "Which exceptions can `{f}` raise?",
    "How would I do the same as `{f}` in JavaScript?", "Write a short quiz question about `{f}` with the answer.",
)  # fmt: skip
_DOC_FORMS = (
    'The documentation of `{f}` says: "{doc}" What does that mean in practice?',
    'Write a Python function with the same behaviour as this one: `{f}` ("{doc}").',
    "Here is a description of a function:\n\n{doc}\n\nWrite a Python function that does this, with type hints.",
    'Write unit tests for `{f}`. Its docstring starts with: "{doc}"',
    'Rewrite this docstring so that a beginner understands it: "{doc}"',
)  # fmt: skip
_SOURCE_FORMS = (
    "Explain what this Python code does:\n\n```python\n{code}\n```",
    "Write a docstring for this function:\n\n```python\n{code}\n```",
    "Add comments to this code:\n\n```python\n{code}\n```",
    "Rewrite this function so that it is easier to read:\n\n```python\n{code}\n```",
    "Write three unit tests for the following function.\n\n```python\n{code}\n```",
    "```python\n{code}\n```\nWhat does this function return? Answer in two sentences.",
    "Add type hints to this function and return only the code.\n\n```python\n{code}\n```",
    "Translate this function to JavaScript:\n\n```python\n{code}\n```",
)
_BUILTIN_TYPES = {"str": str, "list": list, "dict": dict, "set": set}


@lru_cache(maxsize=1)
def _stdlib_names() -> tuple[tuple[str, str], ...]:
    return tuple((module, name) for module, names in _STDLIB.items() for name in names.split())


@cache
def _stdlib_object(module: str, name: str) -> object | None:
    """The named function or class, or None where this Python has none."""
    try:
        owner = _BUILTIN_TYPES.get(module) or importlib.import_module(module)
    except ImportError:
        return None
    return getattr(owner, name) if hasattr(owner, name) else None


@cache
def _first_line(module: str, name: str) -> str:
    """The first sentence of the docstring, or an empty string."""
    paragraph = (inspect.getdoc(_stdlib_object(module, name)) or "").split("\n\n")[0]
    line = " ".join(paragraph.split())
    signature = re.match(r"[\w.]+\(", line) or "->" in line or "0x" in line
    return line if 20 <= len(line) <= 240 and not signature else ""


@cache
def _source(module: str, name: str) -> str:
    """The function's source without its docstring if it is short and written in Python, or an empty string."""
    function = inspect.unwrap(_stdlib_object(module, name)) if module not in _BUILTIN_TYPES else None
    if not inspect.isfunction(function):
        return ""
    try:
        code = inspect.getsource(function)
    except (OSError, TypeError):
        return ""
    code = re.sub(r'\n +r?"""(.|\n)*?"""\n', "\n", code, count=1).strip()
    code = re.sub(r"\n\s*\n+", "\n", code)
    return code if 3 <= code.count("\n") <= 30 and len(code) <= 1300 else ""


def _code_stdlib(rng: random.Random) -> str | None:
    module, name = rng.choice(_stdlib_names())
    other_module, other = rng.choice(_stdlib_names())
    if rng.random() < 0.6:  # a neighbour makes the more natural comparison
        other_module, other = module, rng.choice(_STDLIB[module].split())
    form_kind, roll = rng.random(), rng.random()
    if _stdlib_object(module, name) is None or _stdlib_object(other_module, other) is None:
        return None
    f = name if module == "builtins" else f"{module}.{name}"
    g = other if other_module == "builtins" else f"{other_module}.{other}"
    if form_kind < 0.68:
        form = _STDLIB_FORMS[int(roll * len(_STDLIB_FORMS))]
        if ("{g}" in form and f == g) or ("importing" in form and module in ("builtins", *_BUILTIN_TYPES)):
            return None
        return form.format(f=f, g=g)
    if form_kind < 0.86:
        doc = _first_line(module, name)
        return _DOC_FORMS[int(roll * len(_DOC_FORMS))].format(f=f, doc=doc) if doc else None
    code = _source(module, name)
    return _SOURCE_FORMS[int(roll * len(_SOURCE_FORMS))].format(code=code) if code else None


_LANGUAGES = (
    "Python", "Python", "Python", "Python", "Python", "Python", "JavaScript", "JavaScript", "TypeScript", "Java", "C",
    "C++", "C#", "Go", "Rust", "Ruby", "PHP", "Kotlin", "Swift", "R",
)  # fmt: skip
_OPERATIONS = (
    "reverses the order of the words in a sentence", "counts the vowels in a string", "finds the second largest number",
    "merges two sorted lists", "removes duplicates from a list while keeping the order", "flattens a nested list",
    "computes the n-th Fibonacci number", "checks whether a year is a leap year", "converts Celsius to Fahrenheit",
    "converts an integer to a Roman numeral", "parses a date such as 2024-03-17", "validates an email address",
    "counts how often each word occurs in a text", "sorts a list of people by age", "rotates a list by k positions",
    "checks whether two words are anagrams", "computes the average of a list of numbers", "splits a list into chunks",
    "generates a random password", "finds the longest word in a sentence", "capitalises every word in a title",
    "computes the factorial of a number", "checks whether a number is prime", "lists all primes below n",
    "finds the greatest common divisor of two numbers", "implements binary search", "implements bubble sort",
    "implements quicksort", "implements a stack with push and pop", "implements a queue", "implements a linked list",
    "transposes a matrix", "multiplies two matrices", "computes the distance between two points",
    "compresses a string by run-length encoding", "encrypts a text with a Caesar cipher", "rolls two dice",
    "simulates a coin toss n times", "formats a number of seconds as hours, minutes and seconds",
    "formats a number with thousands separators", "reads a file line by line", "counts the lines in a file",
    "reads a CSV file and returns the sum of one column", "writes a list of dictionaries to a JSON file",
    "downloads a web page and prints its title", "groups a list of words by their first letter",
    "finds the common elements of two lists", "finds the missing number in a list from 1 to n",
    "checks whether brackets in a string are balanced", "returns the digits of a number as a list",
    "computes the sum of the digits of a number", "converts a binary string to an integer",
    "converts a hexadecimal colour to RGB", "truncates a text to n characters and adds an ellipsis",
    "turns a title into a URL slug", "masks all but the last four digits of a card number",
    "computes a running total", "finds the most frequent element of a list", "draws a triangle of stars",
    "prints a multiplication table", "plays rock, paper, scissors against the user", "plays a number guessing game",
    "keeps a to-do list in memory", "models a bank account with deposit and withdraw", "retries a function three times",
    "measures how long a function takes", "caches the results of a slow function", "logs every call of a function",
    "computes compound interest", "computes the monthly payment of a loan", "computes the body mass index",
    "swaps the keys and values of a dictionary", "merges two dictionaries and adds the values of shared keys",
    "finds all files with a given extension in a folder", "renames all files in a folder with a running number",
    "removes all punctuation from a text", "replaces every tab with four spaces", "counts the days between two dates",
    "returns the weekday of a date", "converts snake_case to camelCase", "computes the median of a list",
    "normalises a list of numbers to the range 0 to 1", "computes the dot product of two vectors",
    "searches a list of contacts by name", "paginates a list of results", "calculates a tip and splits the bill",
    "converts a number of bytes to a readable size", "checks the strength of a password", "shuffles a deck of cards",
    "traverses a binary tree in order", "finds the shortest path in a grid", "detects a cycle in a linked list",
)  # fmt: skip
_CODE_EXTRAS = (
    "", "", "", "", "", " Include a docstring.", " Add comments.", " Add an example of how to use it.",
    " Only the code.", " Explain how it works.", " Handle invalid input.", " Write tests for it as well.",
    " Keep it short.", " Do not use any libraries.", " What is its time complexity?",
    " Use descriptive variable names.",
)  # fmt: skip
_CODE_FORMS = (
    "Write a {lang} function that {op}.", "Write a {lang} program that {op}.", "In {lang}, write code that {op}.",
    "Can you write a {lang} function that {op}?", "I need a {lang} function that {op}.", "{lang} function that {op}",
    "Show me how to write a {lang} function that {op}.", "Write a class in {lang} with a method that {op}.",
    "Write a short {lang} script that {op}.", "Implement a {lang} function that {op}.",
)  # fmt: skip

_TABLES = (
    ("customers", "id, name, city, email", "city", "name"),
    ("orders", "id, customer_id, total, created_at", "customer_id", "total"),
    ("employees", "id, name, department, salary, hired_on", "department", "salary"),
    ("products", "id, title, category, price, stock", "category", "price"),
    ("books", "id, title, author, year", "author", "year"), ("students", "id, name, course, grade", "course", "grade"),
    ("flights", "id, origin, destination, minutes", "origin", "minutes"),
    ("visits", "id, page, country, seconds", "country", "seconds"),
)  # fmt: skip
_SQL_TASKS = (
    "counts the rows per {g}", "returns the ten rows with the highest {v}", "returns the average {v} per {g}",
    "returns all rows where {v} is missing", "deletes duplicate rows", "lists every {g} with more than five rows",
    "returns the row with the largest {v} for each {g}", "updates {v} to 0 where {g} is unknown", "returns the "
    "distinct values of {g} in alphabetical order", "adds a column for notes", "ranks the rows by {v} within each {g}",
    "creates the table with suitable column types", "creates an index on {g}", "inserts three example rows",
    "computes the share of each {g} in percent", "returns page 3 with 20 rows per page, sorted by {v}",
)  # fmt: skip
_SHELL_TASKS = (
    "count the lines of all .{e} files in a folder", "find all .{e} files larger than {n} MB",
    "delete .{e} files older than {n} days", "replace a word in all .{e} files", "rename all .{e} files to lower case",
    "list the {n} largest .{e} files", "copy all .{e} files to a backup folder",
    "print the last {n} lines of a .{e} file", "show the second column of a .{e} file",
    "count the unique lines in a .{e} file", "watch a .{e} file for changes",
    "split a .{e} file into parts of {n}00 lines", "search .{e} files for a word and show {n} lines of context",
    "compress all .{e} files into one archive", "sort a .{e} file by its third column",
    "download {n} .{e} files from a list of addresses",
)  # fmt: skip
_SHELL_FORMS = (
    "Write a bash one-liner to {t}.", "How do I {t} on the command line?", "Give me a shell command to {t}.",
    "Write a short bash script to {t}. Explain each line.", "Which Linux command can I use to {t}?",
)  # fmt: skip
_WEB_THINGS = (
    "a login form", "a responsive navigation bar", "a card with an image and a button", "a pricing table",
    "a dark mode switch", "a countdown timer", "a to-do list", "an image gallery", "a contact form",
    "a footer with three columns", "a progress bar", "a modal dialog", "a dropdown menu",
    "a search box that filters a list", "a tooltip", "a tip calculator", "a stopwatch", "a star rating",
    "a table that can be sorted", "a button that counts clicks", "a colour picker", "a quiz with three questions",
    "a loading spinner", "a form that validates a phone number",
)  # fmt: skip
_WEB_FORMS = (
    "Write the HTML for {t}.", "Write HTML and CSS for {t}.", "How do I make {t} with plain JavaScript?",
    "Create a React component for {t}.", "Style {t} with CSS.", "Write a minimal web page with {t}.",
    "Make {t} accessible. Show code.", "Write a Vue component for {t}.",
    "Write {t} in HTML, CSS and JavaScript and explain the code.",
)  # fmt: skip
_REGEX_THINGS = (
    "a German postal code", "a date in the form DD/MM/YYYY", "a time such as 14:35", "a hex colour", "an IPv4 address",
    "a hashtag", "a price in dollars", "a US phone number", "a word in double quotes", "a line that starts with #",
    "a file name that ends in .jpg or .png", "a version number such as 1.12.3", "two equal words in a row", "a URL",
    "a number with an optional decimal part", "leading and trailing spaces", "an HTML tag", "a capitalised word",
)  # fmt: skip
_REGEX_FORMS = (
    "Write a regular expression that matches {t}.", "Which regex matches {t} in {lang}?",
    "How can I find {t} in a text with {lang}?",
    "Write a {lang} function that extracts {t} from a text with a regular expression.",
    "Explain a regex that matches {t} piece by piece.",
)  # fmt: skip
_CODE_TOPICS = (
    "a list and a tuple in Python", "== and is in Python", "an abstract class and an interface",
    "a process and a thread", "let, const and var in JavaScript", "a stack and a queue", "INNER JOIN and LEFT JOIN",
    "git merge and git rebase", "GET and POST requests", "unit tests and integration tests",
    "pass by value and pass by reference", "a compiler and an interpreter", "recursion and iteration", "TCP and UDP",
    "a shallow copy and a deep copy", "HTTP and HTTPS", "SQL and NoSQL databases", "a class and an object",
    "static and dynamic typing", "a float and a decimal", "authentication and authorisation",
    "a library and a framework", "synchronous and asynchronous code", "null and undefined in JavaScript",
    "an array and a linked list", "a hash map and a tree map", "*args and **kwargs", "break and continue",
    "WHERE and HAVING in SQL", "margin and padding in CSS", "a container and a virtual machine",
    "breadth-first and depth-first search",
)  # fmt: skip
_CODE_TOPIC_FORMS = (
    "What is the difference between {t}?", "Explain the difference between {t} with a code example.", "{t}: which one "
    "should I use, and when?", "Explain {t} to someone who has just started programming.", "Make a short table that "
    "compares {t}.", "I was asked about {t} in an interview. What would be a good answer?",
)  # fmt: skip
_CONCEPTS = (
    "recursion", "list comprehensions", "decorators in Python", "generators in Python", "closures",
    "promises in JavaScript", "pointers in C", "garbage collection", "object-oriented programming", "inheritance",
    "Big O notation", "dependency injection", "REST APIs", "version control with git", "exception handling",
    "hash tables", "binary trees", "dynamic programming", "lambda functions", "type hints in Python",
    "context managers", "virtual environments", "race conditions", "database indexes", "SQL injection", "unit testing",
    "continuous integration", "Docker containers", "environment variables", "JSON", "regular expressions",
    "the event loop in JavaScript", "flexbox in CSS", "Markdown", "ownership in Rust", "goroutines in Go",
    "pandas data frames", "NumPy arrays", "f-strings", "async and await",
)  # fmt: skip
_CONCEPT_FORMS = (
    "Explain {t} with a short code example.", "What is the point of {t}?", "Explain {t} in simple terms.",
    "Write a short introduction to {t} for beginners.", "Give me three exercises about {t}, with solutions.",
    "What are best practices for {t}?", "When is it a bad idea to use {t}?", "I don't understand {t}. Can you help?",
    "Write a cheat sheet for {t}.", "Explain {t} with an analogy from everyday life.",
    "What mistakes do beginners make with {t}?",
)  # fmt: skip

# Snippets: $f is a function name, $x and $y are variable names. (correct code, the same code with a bug)
_SNIPPETS: tuple[tuple[str, str, str], ...] = (
    (
        "python",
        "def $f($x):\n"
        "    total = 0\n"
        "    for item in $x:\n"
        "        total += item\n"
        "    return total / len($x)",
        "def $f($x):\n"
        "    total = 0\n"
        "    for item in $x:\n"
        "        total = item\n"
        "    return total / len($x)",
    ),
    (
        "python",
        "def $f($x):\n"
        "    result = []\n"
        "    for value in $x:\n"
        "        if value not in result:\n"
        "            result.append(value)\n"
        "    return result",
        "def $f($x):\n"
        "    result = []\n"
        "    for value in $x:\n"
        "        if value not in result:\n"
        "            result.append(value)\n"
        "            return result",
    ),
    (
        "python",
        "def $f($x, $y=None):\n"
        "    if $y is None:\n"
        "        $y = []\n"
        "    $y.append($x)\n"
        "    return $y",
        "def $f($x, $y=[]):\n"
        "    $y.append($x)\n"
        "    return $y",
    ),
    (
        "python",
        "def $f(n):\n"
        "    if n <= 1:\n"
        "        return 1\n"
        "    return n * $f(n - 1)",
        "def $f(n):\n"
        "    return n * $f(n - 1)",
    ),
    (
        "python",
        "$x = {\"red\": 3, \"green\": 5}\n"
        "for key, value in $x.items():\n"
        "    print(key, value)",
        "$x = {\"red\": 3, \"green\": 5}\n"
        "for key, value in $x:\n"
        "    print(key, value)",
    ),
    (
        "python",
        "with open(\"$x.txt\") as handle:\n"
        "    $y = [line.strip() for line in handle if line.strip()]\n"
        "print(len($y))",
        "handle = open(\"$x.txt\", \"w\")\n"
        "$y = [line.strip() for line in handle if line.strip()]\n"
        "print(len($y))",
    ),
    (
        "python",
        "def $f($x):\n"
        "    low, high = 0, len($x) - 1\n"
        "    while low < high:\n"
        "        $x[low], $x[high] = $x[high], $x[low]\n"
        "        low += 1\n"
        "        high -= 1\n"
        "    return $x",
        "def $f($x):\n"
        "    low, high = 0, len($x)\n"
        "    while low < high:\n"
        "        $x[low], $x[high] = $x[high], $x[low]\n"
        "        low += 1\n"
        "        high -= 1\n"
        "    return $x",
    ),
    (
        "python",
        "class $C:\n"
        "    def __init__(self, $x):\n"
        "        self.$x = $x\n"
        "\n"
        "    def $f(self):\n"
        "        return self.$x * 2",
        "class $C:\n"
        "    def __init__(self, $x):\n"
        "        $x = $x\n"
        "\n"
        "    def $f():\n"
        "        return self.$x * 2",
    ),
    (
        "python",
        "from collections import Counter\n"
        "\n"
        "def $f($x):\n"
        "    $y = Counter($x.lower().split())\n"
        "    return $y.most_common(3)",
        "def $f($x):\n"
        "    $y = Counter($x.lower.split())\n"
        "    return $y.most_common(3)",
    ),
    (
        "python",
        "$x = [1, 2, 3, 4, 5, 6]\n"
        "$y = [n ** 2 for n in $x if n % 2 == 0]\n"
        "print($y)",
        "$x = [1, 2, 3, 4, 5, 6]\n"
        "$y = [n ** 2 for n in $x if n % 2 = 0]\n"
        "print($y)",
    ),
    (
        "python",
        "def $f($x):\n"
        "    try:\n"
        "        return int($x)\n"
        "    except ValueError:\n"
        "        return None",
        "def $f($x):\n"
        "    try:\n"
        "        return int($x)\n"
        "    except:\n"
        "        pass\n"
        "    return $y",
    ),
    (
        "python",
        "for i in range(1, 16):\n"
        "    if i % 15 == 0:\n"
        "        print(\"$x$y\")\n"
        "    elif i % 3 == 0:\n"
        "        print(\"$x\")\n"
        "    elif i % 5 == 0:\n"
        "        print(\"$y\")\n"
        "    else:\n"
        "        print(i)",
        "for i in range(1, 16):\n"
        "    if i % 3 == 0:\n"
        "        print(\"$x\")\n"
        "    elif i % 5 == 0:\n"
        "        print(\"$y\")\n"
        "    elif i % 15 == 0:\n"
        "        print(\"$x$y\")\n"
        "    else:\n"
        "        print(i)",
    ),
    (
        "javascript",
        "function $f($x) {\n"
        "  return $x.filter((n) => n > 0).reduce((a, b) => a + b, 0);\n"
        "}",
        "function $f($x) {\n"
        "  $x.filter((n) => n > 0).reduce((a, b) => a + b, 0);\n"
        "}",
    ),
    (
        "javascript",
        "async function $f($x) {\n"
        "  const response = await fetch($x);\n"
        "  const $y = await response.json();\n"
        "  return $y.length;\n"
        "}",
        "function $f($x) {\n"
        "  const response = fetch($x);\n"
        "  const $y = response.json();\n"
        "  return $y.length;\n"
        "}",
    ),
    (
        "javascript",
        "const $x = document.querySelector('#$f');\n"
        "$x.addEventListener('click', () => {\n"
        "  $x.classList.toggle('active');\n"
        "});",
        "const $x = document.querySelector('$f');\n"
        "$x.addEventListener('click', $x.classList.toggle('active'));",
    ),
    (
        "java",
        "public static int $f(int[] $x) {\n"
        "    int best = $x[0];\n"
        "    for (int value : $x) {\n"
        "        if (value > best) {\n"
        "            best = value;\n"
        "        }\n"
        "    }\n"
        "    return best;\n"
        "}",
        "public static int $f(int[] $x) {\n"
        "    int best = 0;\n"
        "    for (int i = 0; i <= $x.length; i++) {\n"
        "        if ($x[i] > best) {\n"
        "            best = $x[i];\n"
        "        }\n"
        "    }\n"
        "    return best;\n"
        "}",
    ),
    (
        "c",
        "int $f(const char *$x) {\n"
        "    int count = 0;\n"
        "    while (*$x) {\n"
        "        if (*$x == ' ') count++;\n"
        "        $x++;\n"
        "    }\n"
        "    return count;\n"
        "}",
        "int $f(const char *$x) {\n"
        "    int count;\n"
        "    while ($x) {\n"
        "        if (*$x == \" \") count++;\n"
        "        $x++;\n"
        "    }\n"
        "    return count;\n"
        "}",
    ),
    (
        "sql",
        "SELECT $x, COUNT(*) AS n\n"
        "FROM $y\n"
        "GROUP BY $x\n"
        "HAVING COUNT(*) > 5\n"
        "ORDER BY n DESC;",
        "SELECT $x, COUNT(*) AS n\n"
        "FROM $y\n"
        "WHERE COUNT(*) > 5\n"
        "ORDER BY n DESC;",
    ),
    (
        "bash",
        "for file in *.$x; do\n"
        "  mv \"$file\" \"$y-$file\"\n"
        "done",
        "for file in *.$x; do\n"
        "  mv $file $y-file\n"
        "end",
    ),
    (
        "go",
        "func $f($x []int) int {\n"
        "\ttotal := 0\n"
        "\tfor _, n := range $x {\n"
        "\t\ttotal += n\n"
        "\t}\n"
        "\treturn total\n"
        "}",
        "func $f($x []int) int {\n"
        "\ttotal := 0\n"
        "\tfor n := range $x {\n"
        "\t\ttotal += n\n"
        "\t}\n"
        "}",
    ),
)  # fmt: skip
_FUNCTION_NAMES = (
    "process", "compute", "collect_values", "summarize", "handle_items", "get_result", "helper", "run_check",
    "transform", "clean_up", "calculate", "f", "update", "normalize",
)  # fmt: skip
_VARIABLE_NAMES = (
    "data", "values", "numbers", "items", "records", "scores", "prices", "names", "words", "orders", "users", "entries",
    "results", "points", "tasks", "cities", "photos", "events",
)  # fmt: skip
_GOOD_FORMS = (
    "Explain what this code does:\n\n{code}", "What is the output or effect of this code?\n\n{code}",
    "Add comments to this code:\n\n{code}", "Can you improve this code?\n\n{code}",
    "{code}\n\nExplain this line by line.", "Rewrite this code in {lang}:\n\n{code}",
    "Write a test for this code:\n\n{code}", "Review the following code.\n\n{code}",
    "What is the time complexity of this code?\n\n{code}",
    "Rename the variables so that the code is easier to understand:\n\n{code}",
)  # fmt: skip
_BUG_FORMS = (
    "Fix the bug in this snippet:\n\n{code}", "What is wrong with this code?\n\n{code}",
    "{code}\n\nThis doesn't work as expected. Why?", "Find the mistake and correct it.\n\n{code}",
    "I get an error with this code. Can you fix it?\n\n{code}", "Debug this for me:\n\n{code}",
    "Review this code and list all problems:\n\n{code}",
    "Correct this code and return only the fixed version.\n\n{code}",
)  # fmt: skip


def _code_snippet(rng: random.Random) -> str:
    language, good, bad = rng.choice(_SNIPPETS)
    wrong = rng.random() < 0.5
    x, y = rng.sample(_VARIABLE_NAMES, 2)
    code = bad if wrong else good
    names = {
        "$file": "$file",
        "$f": rng.choice(_FUNCTION_NAMES),
        "$C": rng.choice(("Account", "Order", "Point", "Player")),
        "$x": x,
        "$y": y,
    }
    code = re.sub(r"\$(file|f|C|x|y)", lambda match: names[match.group()], code)
    block = f"```{language}\n{code}\n```"
    other = rng.choice([lang for lang in ("Python", "JavaScript", "Go", "Java", "Rust") if lang.lower() != language])
    return rng.choice(_BUG_FORMS if wrong else _GOOD_FORMS).format(code=block, lang=other)


def _code_templates(rng: random.Random) -> str:
    kind = rng.choices(("task", "sql", "shell", "web", "regex", "topic", "concept"), (46, 9, 8, 8, 6, 7, 12))[0]
    lang = rng.choice(_LANGUAGES)
    if kind == "task":
        text, extra = rng.choice(_CODE_FORMS).format(lang=lang, op=rng.choice(_OPERATIONS)), rng.choice(_CODE_EXTRAS)
        return text + ("." if extra and not text.endswith((".", "?")) else "") + extra
    if kind == "sql":
        table, columns, group, value = rng.choice(_TABLES)
        task = rng.choice(_SQL_TASKS).format(g=group, v=value)
        return rng.choice(
            (
                f"Write an SQL statement that {task}. The table is {table}({columns}).",
                f"I have a table `{table}` with the columns {columns}. Write an SQL statement that {task}.",
                f"Table: {table} ({columns})\n\nWrite a PostgreSQL statement that {task}. Explain it briefly.",
                f"Write a SQLite statement that {task} for a table {table}({columns}). Only the SQL, please.",
                f"In pandas, a data frame `{table}` has the columns {columns}. Write code for it that {task}.",
            )
        )
    if kind == "shell":
        extension = rng.choice(("txt", "log", "csv", "py", "jpg", "md", "json", "html"))
        task = rng.choice(_SHELL_TASKS).format(e=extension, n=rng.choice((3, 5, 7, 10, 20, 30)))
        return rng.choice(_SHELL_FORMS).format(t=task)
    if kind == "web":
        text = rng.choice(_WEB_FORMS).format(t=rng.choice(_WEB_THINGS))
    elif kind == "regex":
        text = rng.choice(_REGEX_FORMS).format(t=rng.choice(_REGEX_THINGS), lang=rng.choice(_LANGUAGES[:10]))
    elif kind == "topic":
        text = rng.choice(_CODE_TOPIC_FORMS).format(t=rng.choice(_CODE_TOPICS))
    else:
        text = rng.choice(_CONCEPT_FORMS).format(t=rng.choice(_CONCEPTS))
    return text[:1].upper() + text[1:] if not text.startswith("*") else text


_CODE_FOLLOW = (
    "Can you explain how that works?", "Make it shorter.", "Add error handling.", "Write a test for it.",
    "Add type hints and a docstring.", "Now do it in JavaScript.", "How could it be faster?",
    "What happens with empty input?", "Show me an example call and its output.", "Rewrite it as a class.",
    "Is there a simpler way?", "Thanks! Add comments, please.",
)  # fmt: skip


def _code(rng: random.Random) -> _Draft | None:
    maker: Callable[[random.Random], str | None]
    maker = rng.choices((_code_stdlib, _code_snippet, _code_templates), (36, 18, 46))[0]
    text = maker(rng)
    if text is None:
        return None
    system = "You are an expert programmer. Answer with code first." if rng.random() < 0.03 else None
    asks_for_code = text.startswith(("Write", "In ", "Can you write", "Implement", "I need", "Show", "Create", "Fix"))
    pool = list(_CODE_FOLLOW) if asks_for_code else _parts()["more_explain"]
    if "JavaScript" in text or "SQL" in text or "HTML" in text:
        pool = [turn for turn in pool if "JavaScript" not in turn and "class" not in turn and "type hints" not in turn]
    return _Draft(text, system, _follow_ups(rng, pool, 0.09))


# ---------------------------------------------------------------------------------------------------------------------
# rewrite

_TOWNS = (
    "Ashford", "Millbrook", "Oakdale", "Norrby", "Santa Clara", "Brixen", "Greenhill", "Portside", "Lindau", "Westmore",
)  # fmt: skip
_LAST_NAMES = ("Keller", "Okafor", "Silva", "Novak", "Hughes", "Tanaka", "Berg", "Moreau", "Costa", "Lind")
_PLACES = (
    "library", "museum", "swimming pool", "community centre", "theatre", "animal shelter", "workshop", "tool library",
    "youth club", "botanical garden",
)  # fmt: skip
_EVENTS = ("street run", "summer party", "book fair", "workshop", "music night", "flea market", "chess tournament")
_THINGS = (
    "a new projector", "an old sewing machine", "a camping stove", "a folding table", "a used printer",
    "a record player", "a small tent", "a coffee machine", "a cordless drill", "a second-hand piano",
)  # fmt: skip
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_NEWS = (
    "The town of {town} will open a new {place} next {day}. The project took {n} years and cost {m} million "
    "dollars. Mayor {name} {last} said that residents had waited a long time for it. Entry is free during the first "
    "week.",
    "A {place} in {town} was closed on {day} after a water pipe burst in the basement. Nobody was hurt. Director "
    "{name} {last} expects the repairs to take about {n} weeks. Visitors who already have tickets can ask for a "
    "refund.",
    "More than {k} people took part in the annual {event} in {town} on {day}. The winner, {name} {last}, had "
    "trained for {n} months. Because of heavy rain, the start was delayed by {t} minutes, but the mood remained "
    "cheerful.",
    "Researchers in {town} have followed {k} volunteers for {n} years to find out how {habit} affects sleep. The "
    "team led by {name} {last} found a small but clear improvement. Critics point out that the participants were "
    "mostly students.",
    "The {place} in {town} is looking for volunteers. {name} {last}, who has worked there for {n} years, says that "
    "help is needed most on {day} mornings. No experience is required, and coffee is provided.",
)  # fmt: skip
_MAILS = (
    "Hi {other}, I wanted to let you know that the {event} has been moved from {day} to {day2} because the room is "
    "not available. We start at {h} o'clock. Please bring {thing} and tell {name} if you can't come. Best, {name2}",
    "Dear {other}, thank you for your order of {k} {goods}. Unfortunately, {n} of them are out of stock. We can "
    "send the rest on {day} or wait until the order is complete. Please let us know what you prefer. Kind regards, "
    "{name} {last}",
    "hey {other}, sorry i missed your call yesterday, i was at the {place} with {name}. can we talk on {day} around "
    "{h}? i need your advice about {thing}. also, did you get the {goods}?",
    "Team, in today's meeting we agreed on three things. {name} will order {thing} by {day}. {other} will call the "
    "customer in {town}. The budget for {goods} stays at {k} dollars. The next meeting is on {day2} at {h}.",
)
_REVIEWS = (
    "I stayed in a small hotel near the {place} in {town} for {n} nights. The room was clean and quiet, but "
    "breakfast was disappointing and the Wi-Fi failed every evening. {name} at the front desk was very helpful. I "
    "might come back in a few years if they fix these things.",
    "We bought {thing} for our {event} and I have mixed feelings. It arrived {n} days late, the manual was missing, "
    "and one part was scratched. On the other hand, it works well and looks nicer than in the pictures. For {k} "
    "dollars I expected a bit more.",
    "Last {day} my friend {name} took me to a new restaurant in {town}. We waited {t} minutes for a table, although "
    "we had a reservation. The soup was cold, the main course was great, and the dessert was the best I have had in "
    "{n} years.",
)
_NOTES = (
    "I have been thinking a lot about {habit} lately. When I lived in {town} {n} years ago, I did it almost every "
    "day, and I felt better than I do now. Then work became busy, {name} was born, and I simply stopped. Maybe "
    "{day} would be a good day to start again.",
    "To reach the {place}, leave the station in {town} by the north exit and walk for about {t} minutes along the "
    "canal. After the second bridge, turn left. The entrance is behind the bakery. It opens at {h} o'clock and is "
    "closed on {day}. Tickets cost {n} dollars.",
    "{name} {last} grew up in {town} as the youngest of {n} children. At the age of {t}, {name} left school to work "
    "in a {place}, learned to repair old radios, and later founded a company that employed {k} people. In the end "
    "the company was sold, and {name} returned to {town} to teach.",
    "The product you were interested in is {thing}. It weighs {n} kilograms, is available in {m} colours, and can "
    "be delivered to {town} within {m} days. The warranty lasts {n} years. If you order before {day}, shipping is "
    "free.",
)
_REWRITE_FORMS = (
    "Summarise the following text in one sentence.", "Summarize this in two sentences:", "Make this text shorter:",
    "Rewrite this in a more formal tone:", "Rewrite this in a friendlier tone:", "Rewrite this text in simple English:",
    "Extract the names, places and dates from this text:", "List the key facts of this text as bullet points:",
    "Give this text a headline.", "Turn this into a short social media post:", "Translate this text into {lang}:",
    "Rewrite this text in the past tense:", "Rewrite this from another person's point of view:",
    "Paraphrase this text:", "Write a short reply to this text:",
    "Who is mentioned in this text, and what did they do?", "What is the main point of this text?",
    "Turn the following text into a table of facts.", "Rewrite this so that a child can understand it:",
    "Make this more concise, but keep all numbers.", "Expand this text with one more paragraph:",
    "Make this sound more professional:", "Return a JSON object with the most important facts from this text:", "tl;dr",
    "Write three questions that this text answers.", "What information is missing from this text?",
    "Rewrite the text as a dialogue.", "Explain in your own words what this says:", "Turn this into a haiku:",
    "Is the tone of this text positive or negative? Explain.",
)  # fmt: skip
_FIX_FORMS = (
    "Fix the grammar and spelling:", "Correct the mistakes in this text.", "Proofread this, please:",
    "Please correct this text and explain the mistakes:", "Correct the text. Return only the corrected version.",
    "Clean this up for me:",
)  # fmt: skip


def _passage(rng: random.Random) -> str:
    name, name2, other = rng.sample(_NAMES, 3)
    day, day2 = rng.sample(_DAYS, 2)
    return rng.choice(_NEWS + _MAILS + _REVIEWS + _NOTES).format(
        town=rng.choice(_TOWNS),
        name=name,
        name2=name2,
        other=other,
        day=day,
        day2=day2,
        last=rng.choice(_LAST_NAMES),
        place=rng.choice(_PLACES),
        event=rng.choice(_EVENTS),
        habit=rng.choice(("walking", "swimming", "reading", "gardening", "singing", "cooking")),
        thing=rng.choice(_THINGS),
        goods=rng.choice(_GOODS),
        n=rng.randint(2, 9),
        m=rng.randint(2, 8),
        k=rng.choice((40, 75, 120, 250, 300, 480, 900)),
        t=rng.randint(11, 45),
        h=rng.randint(2, 11),
    )


_SLIPS = (
    (" is ", " are "), (" was ", " were "), (" have ", " has "), (" their ", " there "), (" because ", " becuase "),
    (" which ", " wich "), (" a ", " an "), (" the ", " teh "), ("'", ""), (" and ", " an "), (" will ", " wil "),
    (" until ", " untill "), ("receive", "recieve"), (" really ", " realy "), (" said ", " sayed "),
    (" took ", " taked "), (" about ", " abuot "), (" to ", " too "), (". ", " "), (" friend ", " freind "),
    (" more ", " moore "),
)  # fmt: skip


def _with_mistakes(rng: random.Random, text: str) -> str:
    """The text with a handful of typical slips."""
    present = [slip for slip in _SLIPS if slip[0] in text]
    for good, bad in rng.sample(present, min(len(present), rng.randint(3, 5))):
        text = text.replace(good, bad, 1)
    return text.lower() if rng.random() < 0.2 else text


_REWRITE_FOLLOW = (
    "Even shorter, please.", "Now make it more formal.", "Translate it into Spanish.", "Use bullet points.", "Make it "
    "friendlier.", "What did you change?", "Give it a title.",
)  # fmt: skip


def _rewrite(rng: random.Random) -> _Draft:
    passage = _passage(rng)
    sentences = re.split(r"(?<=[.?!]) ", passage)
    if len(sentences) > 3 and rng.random() < 0.25:  # short passages as well
        passage = " ".join(sentences[: rng.randint(2, 3)])
    elif rng.random() < 0.1:
        passage += "\n\n" + _passage(rng)
    if rng.random() < 0.25:
        form, passage = rng.choice(_FIX_FORMS), _with_mistakes(rng, passage)
    else:
        form = _fill(rng, rng.choice(_REWRITE_FORMS))
    layout = rng.random()
    if layout < 0.7:
        text = f"{form}\n\n{passage}"
    elif layout < 0.85:
        text = f"{passage}\n\n{form.rstrip(':')}{'.' if form.endswith(':') else ''}"
    else:
        text = f'{form} "{passage}"'
    return _Draft(text, None, _follow_ups(rng, _REWRITE_FOLLOW, 0.06))


# ---------------------------------------------------------------------------------------------------------------------
# The stream

_MAKERS: dict[str, Callable[[random.Random], _Draft | None]] = {
    "math": _math, "code": _code, "chat": _chat, "list": _list, "short": _short, "rewrite": _rewrite,
}  # fmt: skip


def _domain_stream(domain: str, seed: int, questions: list[str]) -> Iterator[Prompt]:
    """Distinct prompts of one domain; ends when new ones have become too rare."""
    make = _MAKERS[domain]
    seen: set[str] = set()
    attempt = misses = 0
    waiting = list(questions)
    random.Random(f"{seed}:questions").shuffle(waiting)
    while misses < _MAX_MISSES:
        rng = random.Random(f"{seed}:{domain}:{attempt}")
        attempt += 1
        draft: _Draft | None
        if waiting and rng.random() < 0.6:
            suffix = rng.choice(_HOW) if rng.random() < 0.4 else ""
            draft = _Draft(waiting.pop().strip() + suffix, None, _follow_ups(rng, _MATH_FOLLOW, 0.05))
        else:
            draft = make(rng)
        if draft is None:
            misses += 1
            continue
        key = " ".join(draft.text.casefold().split())
        if key in seen or any(is_excluded(text) for text in (draft.text, *draft.follow_ups)):
            misses += 1
            continue
        seen.add(key)
        misses = 0
        user = {"role": "user", "content": draft.text}
        messages = ({"role": "system", "content": draft.system}, user) if draft.system else (user,)
        yield make_prompt(domain, messages, draft.follow_ups)


def training_prompts(seed: int = 0, gsm8k: Path | None = None) -> Iterator[Prompt]:
    """A long deterministic stream of distinct prompts (more than 40,000), its domains mixed in the shares of `SHARES`.

    The same seed (and the same GSM8K file) gives the same stream. With `gsm8k`, the path of the training questions as
    JSON lines, about 60 % of the math prompts are those questions, each used once. The stream ends when one domain has
    nothing new to say.
    """
    questions = _gsm8k_questions(Path(gsm8k)) if gsm8k is not None else []
    streams = {domain: _domain_stream(domain, seed, questions if domain == "math" else []) for domain in SHARES}
    block = [domain for domain, count in SHARES.items() for _ in range(count)]
    seen: set[str] = set()
    number = 0
    while True:
        order = list(block)
        random.Random(f"{seed}:order:{number}").shuffle(order)
        number += 1
        for domain in order:
            prompt = next((p for p in streams[domain] if p.messages[-1]["content"].casefold() not in seen), None)
            if prompt is None:
                return
            seen.add(prompt.messages[-1]["content"].casefold())
            yield prompt


# ---------------------------------------------------------------------------------------------------------------------
# The user's own prompts


def _checked_text(value: object, what: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{what} must be a non-empty string")
    return value


def _read_record(record: object) -> Prompt:
    """One record of the user's file; raises ValueError that says what is wrong."""
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object, found {type(record).__name__}")
    domain = record.get("domain", "user")
    if not isinstance(domain, str) or not domain:
        raise ValueError('"domain" must be a non-empty string')
    if "messages" in record:
        messages = record["messages"]
        if not isinstance(messages, list) or not messages:
            raise ValueError('"messages" must be a non-empty list')
        checked = []
        for position, message in enumerate(messages):
            what = f'"messages"[{position}]'
            if not isinstance(message, dict):
                raise ValueError(f'{what} must be an object with "role" and "content"')
            role = message.get("role")
            if role not in ("system", "user", "assistant"):
                raise ValueError(f'{what}: "role" must be "system", "user" or "assistant", found {role!r}')
            checked.append({"role": role, "content": _checked_text(message.get("content"), f'{what}: "content"')})
        while checked and checked[-1]["role"] == "assistant":  # a finished conversation: the model answers anew
            checked.pop()
        if not checked or checked[-1]["role"] != "user":
            raise ValueError('"messages" must contain a user message after any system message')
        return make_prompt(domain, tuple(checked))
    if "turns" in record:
        turns = record["turns"]
        if not isinstance(turns, list) or not turns:
            raise ValueError('"turns" must be a non-empty list of strings')
        texts = [_checked_text(turn, f'"turns"[{position}]') for position, turn in enumerate(turns)]
        return make_prompt(domain, ({"role": "user", "content": texts[0]},), tuple(texts[1:]))
    for key in ("prompt", "question"):
        if key in record:
            return make_prompt(domain, ({"role": "user", "content": _checked_text(record[key], f'"{key}"')},))
    raise ValueError('expected one of the keys "prompt", "messages", "turns" or "question"')


def read_prompts(path: Path) -> Iterator[Prompt]:
    """Read prompts from JSON lines: {"prompt": ...}, {"messages": [...]}, {"turns": [...]} or {"question": ...}.

    Blank lines are skipped. Other keys are ignored, apart from an optional "domain". A line that cannot be used raises
    ValueError with the file and the line number.
    """
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                prompt = _read_record(json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8")))
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not valid JSON ({error.msg})") from None
            except UnicodeDecodeError:
                raise ValueError(f"{path}:{number}: not valid UTF-8") from None
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from None
            yield prompt
