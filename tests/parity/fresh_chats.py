"""20 chats to measure drafters with. They were written after the heads of `assets/` had been trained.

`examples/training_prompts.json` was written with the chats of `prompts.py` in view: its kinds and layouts are
theirs. Accept lengths of those chats therefore say how a head drafts for texts that it was trained for. These
say how it drafts for others. A test keeps the two apart; do not write training prompts towards these.

    python -m baton.tests.parity.fresh_chats > fresh.jsonl      # for `baton draft evaluate --prompt-file`
"""

import json

from baton.tests.parity.prompts import ParityPrompt, chat

_SCENE = """\
Continue the scene.

INT. SUBMARINE - NIGHT

Red light. Water drips somewhere. MARLOW holds a wrench like a microphone.

MARLOW
Tell them we surface at dawn or not at all.

CHEN
(without looking up)
You said that yesterday."""

_NGINX = """\
Here is part of our nginx config:

location /api/ {
    proxy_pass http://backend;
    proxy_read_timeout 5s;
}

Uploads above 1 MB fail with 413 and slow reports with 504. What do I change?"""

FRESH_CHATS: tuple[ParityPrompt, ...] = (
    chat(
        "fan",
        "my laptop fan is super loud since yesterday and it gets hot on my knees, anything i can "
        "try before i bring it in?",
    ),
    chat("slogans", "Brainstorm slogans for a small bike repair shop that also sells second-hand books."),
    chat(
        "job-offers",
        "I have two job offers. One pays more but the commute is 70 minutes each way; the other "
        "is a ten minute walk from my flat and pays 15% less. I have a toddler. Help me decide.",
    ),
    chat(
        "rust-borrow",
        'Rust: the borrow checker complains "cannot borrow `self.cache` as mutable because it is '
        'also borrowed as immutable". When does that usually happen and what are my options?',
    ),
    chat(
        "less-angry",
        "Rewrite this so that it sounds less angry: Your courier left the package in the rain "
        "AGAIN and now everything is soaked. I have told you people three times. Fix it or I am "
        "done with you.",
    ),
    chat(
        "bash-delete",
        "bash one-liner to delete every .log file older than 14 days below /var/tmp but print "
        "the names first",
    ),
    chat("proof", "Prove that the sum of two odd integers is even."),
    chat(
        "plant-store",
        "The leaves of my monstera turned yellow at the edges two weeks after it arrived. Can I "
        "send it back?",
        system="You are the support assistant of an online plant store. Only talk about plants and orders.",
    ),
    chat("italian", "Scrivi una breve recensione di un ristorante di pesce a Trieste, tono ironico."),
    chat("portuguese", "Qual é a melhor época do ano para visitar os Açores e por quê?"),
    chat("scene", _SCENE),
    chat(
        "minutes",
        "Minutes of our stand-up, please turn into action items with an owner each:\nSo Dana said "
        "the login page still breaks on Safari, she will look at it after lunch. Piotr waits for "
        "the design of the settings screen, Ruth promised it for Thursday. I will ask legal "
        "about the cookie banner. And somebody has to renew the certificate before the 14th, "
        "Piotr volunteered.",
    ),
    chat("regex", "Which regular expression matches a 24-hour time such as 07:45 or 23:10 but not 24:00?"),
    chat(
        "debate",
        "Debate me: homework should be abolished in primary schools. You take the side against me.",
        "Homework trains discipline. Children who practise at home learn to organise their own "
        "time, and parents see what is taught.",
        "But not every home is quiet. Doesn't homework punish poor kids?",
    ),
    chat(
        "moon",
        "What would happen if the Moon suddenly vanished tonight? First the next hours, then the next years.",
    ),
    chat("nginx", _NGINX),
    chat(
        "feedback",
        "Give feedback on my opening paragraph: It was a dark day, darker than other days, and "
        "Tom felt dark inside as he walked the dark road to the dark house where he was born, "
        "thinking dark thoughts about the dark past.",
    ),
    chat(
        "logic",
        "Three friends, Ana, Ben and Cal, each own a different pet: a parrot, a snake, a rabbit. "
        "Ana is allergic to fur. Ben is afraid of reptiles. Cal's pet can talk. Who owns what?",
    ),
    chat(
        "documentary",
        "Describe an office worker making the first coffee of the day.",
        system="Respond only in the style of a nature documentary narrator.",
    ),
    chat(
        "dinner",
        "I'm hosting eight people on Saturday, two vegans, one gluten-free, and I only own one "
        "large pot and a small oven. Plan the dinner and tell me what to cook when.",
        "Serve a chickpea and tomato stew with rice: it suits everybody and needs one pot. Bake "
        "potatoes beside it.",
        "nice. and dessert? nothing with bananas please",
    ),
)


if __name__ == "__main__":
    for prompt in FRESH_CHATS:
        print(json.dumps({"messages": prompt.messages()}, ensure_ascii=False))
