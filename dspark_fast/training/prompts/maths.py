"""Mathematics: arithmetic, algebra, geometry and word problems with drawn numbers, and questions from a file."""

from __future__ import annotations

import random

from dspark_fast.training.prompts.draft import Draft, draw_follow_ups, weighted
from dspark_fast.training.prompts.grammar import load_parts

_PARTS = load_parts("shared")
_HOW = (
    "", "", "", "", "", "", " Think step by step.", " Show your work.", " Let's solve this step by step.",
    " Explain each step.", " Give only the final answer.", " Please explain your reasoning.",
    " Show your calculation and then state the answer.", "\nPut the final answer on the last line.",
)  # fmt: skip
_FOLLOW_UPS = (
    "Can you check your answer?", "Explain it in a simpler way.", "What if the first number were twice as large?",
    "Now write it as a single equation.", "Give me a similar problem to practise.", "Why did you do the first step?",
    "Are you sure?",
)  # fmt: skip


def draw_math(rng: random.Random) -> Draft:
    """A calculation, an exercise or a word problem."""
    make = weighted(rng, {_arithmetic: 15, _algebra: 22, _geometry: 15, _word_problem: 48})
    text = make(rng)
    if make is not _arithmetic:
        text += rng.choice(_HOW)
    return Draft(text, None, draw_follow_ups(rng, _FOLLOW_UPS, 0.05))


def with_question(rng: random.Random, question: str) -> Draft:
    """A given question, at times with a wish for how to answer it."""
    how = rng.choice(_HOW) if rng.random() < 0.4 else ""
    return Draft(question.strip() + how, None, draw_follow_ups(rng, _FOLLOW_UPS, 0.05))


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
    name, other = rng.sample(_PARTS["name"], 2)
    goods, more = rng.sample(_PARTS["goods"], 2)
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
