"""What the user of a generated chat asks: forms of questions, and the topics that they are about."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

OPENER_SHARE = 0.15  # of the first messages

FORMS = (  # of a first question about a topic {t}
    "What is {t}?",
    "Tell me about {t}.",
    "Can you tell me something about {t}?",
    "Explain {t} to a child.",
    "Explain {t} in simple words.",
    "What should I know about {t}?",
    "Why does {t} matter?",
    "Give me three facts about {t}.",
    "Write a short story about {t}.",
    "Write a short poem about {t}.",
    "I have a question about {t}.",
    "How does {t} work?",
    "What do people get wrong about {t}?",
    "What is the history of {t}?",
    "Give me some advice about {t}.",
    "I want to learn about {t}. Where do I start?",
    "What are the pros and cons of {t}?",
    "Describe {t} in one sentence.",
    "Describe {t} in a paragraph.",
    "What is the most interesting thing about {t}?",
    "Make a list of five ideas about {t}.",
    "Give me a summary of {t}.",
    "What words should I know to talk about {t}?",
    "Write a dialogue about {t}.",
    "Ask me a question about {t}.",
    "Can you help me with {t}?",
    "What do you think about {t}?",
    "Compare {t} with something else.",
    "Write a short email to a friend about {t}.",
    "Who should care about {t}?",
    "What are common problems with {t}?",
    "hey, can you explain {t} quickly?",
    "I'm writing an essay about {t}. Help me with the introduction.",
    "Give me an example that has to do with {t}.",
    "What is a good title for an article about {t}?",
    "My daughter asked me about {t}. What should I say?",
    "Is {t} important? Why or why not?",
    "Teach me about {t} step by step.",
    "What would the world be like without {t}?",
    "Write three quiz questions about {t} with their answers.",
)
OPENERS = (  # first messages that need no topic
    "Hi",
    "Hello!",
    "Hi, how are you?",
    "Hey there",
    "Good morning!",
    "Good evening.",
    "Hello, who are you?",
    "What can you do?",
    "What is your name?",
    "Can you help me?",
    "I'm bored. What should I do?",
    "Tell me a joke.",
    "Tell me a story.",
    "Tell me something interesting.",
    "What is 7 times 8?",
    "What is 12 + 30?",
    "What is half of 90?",
    "If I have 3 apples and buy 4 more, how many do I have?",
    "What is the capital of France?",
    "What is the capital of Japan?",
    "Which is the largest planet?",
    "Who wrote Romeo and Juliet?",
    "What color is the sky?",
    "How many days are in a week?",
    "I feel sad today.",
    "I'm nervous about tomorrow.",
    "I had a great day!",
    "What should I cook tonight?",
    "Recommend me a book.",
    "Give me a writing prompt.",
    "How do I say thank you in Spanish?",
    "What does 'ephemeral' mean?",
    "Use the word 'bright' in a sentence.",
    "Correct this sentence: She go to school every days.",
    "Rewrite this politely: Give me the report now.",
    "Write a haiku.",
    "Name five animals.",
    "Name three colors.",
    "List the months of the year.",
    "Count from one to ten.",
    "Translate 'good night' into French.",
    "Write a Python function that adds two numbers.",
    "Write a for loop in Python.",
    "What is a variable in programming?",
    "How do I fix a bug in my code?",
    "How can I sleep better?",
    "How do I boil an egg?",
    "Plan a weekend trip for me.",
    "I need a gift for my mother.",
    "Help me write a thank-you note.",
    "Make a to-do list for a busy day.",
    "What is the difference between a frog and a toad?",
    "Summarize the story of Cinderella.",
    "Is it better to rent or to buy?",
)
FOLLOW_UPS = (  # later questions; some change the topic
    "Can you explain that more simply?",
    "Why?",
    "Why is that?",
    "Can you give me an example?",
    "Give me another example.",
    "Tell me more.",
    "Thanks! What else should I know?",
    "Thank you.",
    "Thanks, that helps.",
    "Are you sure?",
    "Can you make it shorter?",
    "Summarize that in one sentence.",
    "What does that mean?",
    "How does that work?",
    "I don't understand. Can you try again?",
    "Interesting. Who discovered that?",
    "And what about children?",
    "Can you say that as a list?",
    "What is the first step?",
    "What would you do?",
    "Is that always true?",
    "Write that as a poem.",
    "What are the risks?",
    "How long does it take?",
    "How much does it cost?",
    "Where can I find out more?",
    "Give me three tips.",
    "Now tell me the opposite view.",
    "Ok. Let's talk about {t}.",
    "What does this have to do with {t}?",
    "That reminds me of {t}. What can you say about it?",
    "Can you compare it with {t}?",
    "What is the most important point?",
    "Rewrite it in a friendly tone.",
    "Can you add some details?",
    "What happens next?",
    "Could you ask me a question about it?",
    "What was my first question?",
    "Great, and how about {t}?",
    "One last thing: what is {t}?",
)


def draw_question(rng: random.Random, topics: Sequence[str], first: bool) -> str:
    """A question as `rng` draws it: the first one of a chat, or one that follows an answer."""
    if first and rng.random() < OPENER_SHARE:
        return rng.choice(OPENERS)
    return rng.choice(FORMS if first else FOLLOW_UPS).format(t=rng.choice(topics))


def load_topics(path: Path) -> tuple[list[str], list[str]]:
    """Topics for training and topics held out, which stand after a line `%%`."""
    lines = [
        x.strip()
        for x in path.read_text(encoding="utf-8").splitlines()
        if x.strip() and not x.startswith("#")
    ]
    cut = lines.index("%%") if "%%" in lines else len(lines)
    return lines[:cut], lines[cut + 1 :]
