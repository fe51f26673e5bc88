"""Five programs of prompts (serving/programs.py), each about ten lines, for a model of code.

    python generate.py "a queue" --program serving/program_examples.py:skeleton_of_thought

With `--max-num-seqs 1` the same calls run one at a time, for comparison. A program's first argument
makes calls, the second is the prompt of the command line. The shipped model writes Python-shaped
text, no more: the programs show the form.
"""

from collections import Counter


async def skeleton_of_thought(p, prompt):
    """An outline, then all of its points at once, which share it as their prefix."""
    skeleton = "# The methods of {prompt}, one per line:\n# 1. get\n# 2. put\n# 3. close\n#"
    outline = p.call(skeleton, prompt=prompt, max_new_tokens=24)
    point = "# The methods of {prompt}:\n#{outline}\n\nclass X:\n    # implements{line}\n    def "
    points = outline.lines("#").map(
        lambda line: p.call(point, prompt=prompt, outline=outline, line=line, max_new_tokens=24)
    )
    return await p.apply(lambda *texts: "\n\n".join(texts[0]), points)


async def map_reduce(p, prompt):
    """A sentence on each part, in one batch for throughput, and one on all of them for latency."""
    parts = [part for part in prompt.split("\n") if part.strip()]
    ask = '{part}\n    """'
    notes = [p.call(ask, part=part, stop=["\n", '"""'], max_new_tokens=24) for part in parts]
    return await p.call('"""{notes}\n\nSummary: ', notes=notes, stop='"""', max_new_tokens=32)


async def self_consistency(p, prompt):
    """The most frequent of eight sampled answers to one prompt, which is prefilled once."""
    answers = [
        p.call("{prompt}", prompt=prompt, temperature=0.8, seed=i, max_new_tokens=8, stop="\n")
        for i in range(8)
    ]
    return await p.apply(lambda *texts: Counter(texts).most_common(1)[0][0], *answers)


async def pick_by_select(p, prompt):
    """Two branches of one text, of which the model selects the one to go on with."""
    text = p.state(prompt)
    branches = text.fork(2)
    for seed, branch in enumerate(branches):
        branch += f"# version {seed + 1}\n"
        branch.gen(temperature=0.8, seed=seed, max_new_tokens=24, stop="\n\n")
    text.join(branches)
    text += "\n# the best is version "
    return await text.select(["1", "2"])


async def streaming_pipeline(p, prompt):
    """Each line is commented while the next one is written, in order."""
    code = p.call("{prompt}", prompt=prompt, max_new_tokens=60)

    def with_comment(line):
        comment = p.call("{line}  # ", line=line, max_new_tokens=12, stop="\n")
        return p.apply("{}  # {}".format, line, comment)

    return "\n".join(await code.lines().map(with_comment))
