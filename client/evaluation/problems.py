"""The demo's problems: written for it, to make a small model reason for long."""

from __future__ import annotations

from typing import Final

PROBLEMS: Final = (
    "A baker sells small loaves for 3 coins and large loaves for 5 coins. On Monday she sold 46 "
    "loaves and took 182 coins. How many loaves of each size did she sell? Think step by step, "
    "check every step, and try a second method to confirm the answer.",
    "Four friends sit in a row of four chairs. Ada will not sit at either end, Ben sits "
    "somewhere to the left of Cleo, and Dan sits beside Ada. List every possible order. Work "
    "through the cases one by one and check each of them against all conditions.",
    "A tank holds 240 litres. One pipe fills it in 6 hours, another in 4 hours, and a drain "
    "empties it in 12 hours. The drain is opened one hour after both pipes. When is the tank "
    "full? Reason step by step, keep track of the litres after each hour, and verify the result.",
    "Write a function that finds the longest run of equal characters in a string. First explain "
    "the idea, then go through the example 'aabbbbcdd' character by character, then think about "
    "the empty string and other special cases, and explain how each of them is handled.",
)
