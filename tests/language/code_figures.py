"""Measure how readable the code is: sizes, names, docstrings, imports.

    python tests/language/code_figures.py            # one line a figure, of the four packages of the product
    python tests/language/code_figures.py FOLDER ... # of other folders, tests or another project

`tests/test_language.py` holds the figures that have a bound; `walks.py` beside this file measures
how far a command walks.
"""

from __future__ import annotations

import ast
import re
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = ("fedsim", "strategies", "adversaries", "clients")

Function = ast.FunctionDef | ast.AsyncFunctionDef
Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp

IRREGULAR_PARTICIPLES = frozenset(
    """
    asked been begun bent blown born bought bound broken brought built chosen come cut dealt
    done drawn driven fallen fed felt fought found frozen given gone grown hidden held kept
    known laid led left lent let lost made meant met moved overlaid owed paid parted put read
    ridden risen run said seen sent shown shut sold sought spent split spoken spread stood
    struck sung sunk sworn swept taken taught thought thrown told understood undone unknown
    unseen untold withheld won worn woven written
    """.split()  # noqa: SIM905  (a paragraph is read more easily than a list)
)
PARTICIPLES_THAT_ARE_VERBS_TOO = frozenset(
    """
    come cut let lay put read run shut split
    """.split()  # noqa: SIM905  (a paragraph is read more easily than a list)
)
"""`read`, `run`, `put` or `split` is the verb that a function's name should be."""

NOUNS_AND_VERBS_IN_ED = frozenset(
    """
    bed embed exceed feed led need proceed red seed shed shred speed succeed
    """.split()  # noqa: SIM905  (a paragraph is read more easily than a list)
)
NOUNS_IN_ING = frozenset(
    """
    accounting advertising batching being bounding bring building casting clipping encoding
    embedding ending engineering finding grouping heading king labelling learning meaning mixing
    opening padding pairing partitioning pricing pruning ranking reading recording ring rounding
    sampling scaling scoring setting sharing smoothing spacing spelling spring string thing
    training warning weighting wing wording writing
    """.split()  # noqa: SIM905  (a paragraph is read more easily than a list)
)
FUNCTION_WORDS = frozenset(
    """
    a about above across after again against ahead alike all alone along already also although
    always among an and any anything apart around as aside at away back because before behind
    below beneath beside besides between beyond both but by down during each either else enough
    even ever every everyone everything except few for from further hardly he hence her here how
    however if in indeed inside instead into it its itself just later least less like likewise
    many maybe me mere more most much near neither never next no nobody none nor not nothing now
    of off often on once one only onto or other others otherwise our out outside over own per
    perhaps quite rather same several she since so some somebody something soon still such than
    that the their them then there these they this those though through thus to together too
    toward under unless until up upon us very via we well what whatever when where whether which
    while who whole whom whose why with within without yet you
    """.split()  # noqa: SIM905  (a paragraph is read more easily than a list)
)
"""Prepositions, adverbs, conjunctions, pronouns and determiners: they say nothing of what a function does."""

ADJECTIVES = frozenset(
    """
    big flat free full large late long loose odd pale plain short small sole tight whole wide
    """.split()  # noqa: SIM905  (a paragraph is read more easily than a list)
)

VAGUE_VALUES = frozenset(
    """
    one some found told others place own other said those each all_ made
    """.split()  # noqa: SIM905  (a paragraph is read more easily than a list)
)
"""Names of values that do not say what a value holds; the list that the target was set with."""

OPENERS_THAT_LEAN_ON_A_NAME = frozenset(
    """
    Of By What Where With As See Whether Whom In At
    """.split()  # noqa: SIM905  (a paragraph is read more easily than a list)
)
"""Words after which a docstring is understood only together with the name above it."""

VERBS = frozenset(
    """
    Accept Account Accumulate Adapt Add Adjust Advance Advise Aggregate Align Allocate Allow
    Answer Append Apply Approximate Ask Assemble Assert Assign Attach Attack Audit Average
    Balance Batch Begin Bind Bound Break Bring Build Cache Calculate Call Cancel Cap Carry Cast
    Center Centre Change Check Choose Chunk Claim Classify Clean Clear Clip Close Cluster
    Collect Combine Compare Compile Complete Compose Compress Compute Concatenate Configure
    Connect Construct Continue Convert Copy Correct Count Cover Crash Create Crop Cut Decide
    Declare Decode Decompose Decorate Decrypt Deduce Define Delay Delete Deliver Demand Deny
    Derive Descend Describe Detach Detect Determine Disable Discard Display Distribute Divide
    Download Draw Drop Dump Emit Empty Enable Encode Encrypt End Enforce Ensure Enter Enumerate
    Erase Escape Establish Estimate Evaluate Exchange Exclude Execute Expand Expect Explain
    Expose Express Extend Extract Fail Feed Fetch Fill Filter Find Finish Fit Flatten Flip Fold
    Follow Forget Form Format Forward Freeze Gather Generate Get Give Go Grant Group Guard Guess
    Handle Hash Hide Hold Identify Ignore Import Improve Include Increase Infer Inform
    Initialise Initialize Insert Inspect Install Interpolate Intersect Invert Invoke Isolate
    Iterate Join Judge Keep Label Launch Lay Learn Leave Let Limit Link List Listen Load Locate
    Lock Log Look Lower Make Manage Map Mark Mask Match Maximise Measure Merge Minimise Mix
    Model Modify Move Name Narrow Normalise Normalize Note Number Obtain Offer Omit Open
    Optimise Order Pack Pad Pair Parse Partition Pass Pause Perform Permute Perturb Pick Place
    Plan Play Plot Poll Pool Post Predict Prepare Present Preserve Press Print Probe Process
    Produce Project Promise Prove Provide Prune Publish Pull Push Put Quantise Quote Raise Rank
    Read Rebuild Receive Recognise Recompute Reconstruct Record Recover Reduce Refine Refuse
    Register Reject Relax Release Reload Remember Remove Rename Render Repair Repeat Replace
    Reply Report Represent Reproduce Request Require Rescale Reserve Reset Reshape Resolve
    Respond Restart Restore Restrict Resume Retrieve Return Reuse Reverse Round Run Sample Save
    Say Scale Scan Score Search Select Send Separate Serialise Serve Set Shape Share Ship Show
    Shrink Shuffle Sign Signal Simulate Skip Smooth Solve Sort Split Stack Standardise Start
    State Step Stop Store Stream Strip Subtract Sum Summarise Supply Swap Switch Take Talk Tell
    Test Throw Tokenise Track Train Transform Translate Treat Trim Truncate Try Turn Undo Unpack
    Unroll Unwrap Update Upload Use Validate Verify View Visit Wait Wake Walk Warn Watch Weigh
    Whiten Wipe Wrap Write Yield Zero
    """.split()  # noqa: SIM905  (a paragraph is read more easily than a list)
)


@dataclass
class CodeFigures:
    """Counts over the files of some folders; shares are properties."""

    lines: int = 0
    long_lines: int = 0
    import_lines: int = 0
    comment_lines: int = 0
    file_sizes: list[int] = field(default_factory=list)
    function_sizes: list[int] = field(default_factory=list)
    function_names: Counter[str] = field(default_factory=Counter)
    class_places: dict[str, list[str]] = field(default_factory=dict)
    docstring_lines: int = 0
    docstrings: int = 0
    function_docstrings: int = 0
    verb_openings: int = 0
    leaning_openings: int = 0
    assignments: int = 0
    vague_assignments: int = 0
    comprehensions: int = 0
    doctest_files: int = 0
    silent_files: list[str] = field(default_factory=list)

    @property
    def comprehension_density(self) -> float:
        """Return the comprehensions in 1,000 lines without docstrings, so that shorter prose does not raise it."""
        return 10 * self.share(self.comprehensions, self.lines - self.docstring_lines)

    @property
    def bare_names(self) -> int:
        """Return how many functions are named by words that say nothing of what they do."""
        return sum(count for name, count in self.function_names.items() if is_bare(name))

    @property
    def classes_twice(self) -> dict[str, list[str]]:
        """Return the class names that stand more than once, with their files."""
        return {name: places for name, places in self.class_places.items() if len(places) > 1}

    def share(self, part: int, whole: int) -> float:
        """Return `part` of `whole` in percent."""
        return 100 * part / max(whole, 1)

    def rows(self) -> list[tuple[str, str]]:
        """Return each figure with its name, for printing."""
        functions = sum(self.function_names.values())
        one_word = sum(count for name, count in self.function_names.items() if "_" not in name.strip("_"))
        return [
            ("files", f"{len(self.file_sizes)}"),
            ("lines", f"{self.lines:,}"),
            ("lines of a file, median / 90 % / most", _quantiles(self.file_sizes)),
            ("functions", f"{functions:,}"),
            ("lines of a function, median / 90 % / most", _quantiles(self.function_sizes)),
            ("names of one word", f"{self.share(one_word, functions):.1f} %"),
            ("names of participles, adverbs, prepositions", f"{self.bare_names}"),
            ("class names that stand twice", f"{len(self.classes_twice)}"),
            (
                "function docstrings that open with a verb",
                f"{self.share(self.verb_openings, self.function_docstrings):.0f} %",
            ),
            (
                "docstrings that open with Of, By, What ...",
                f"{self.share(self.leaning_openings, self.docstrings):.1f} %",
            ),
            ("assignments to vague names", f"{self.share(self.vague_assignments, self.assignments):.1f} %"),
            ("comprehensions in 1,000 lines without docstrings", f"{self.comprehension_density:.1f}"),
            ("comment lines in 1,000", f"{10 * self.share(self.comment_lines, self.lines):.0f}"),
            ("import lines", f"{self.share(self.import_lines, self.lines):.1f} %"),
            ("lines over 100 columns", f"{self.share(self.long_lines, self.lines):.1f} %"),
            ("files with a doctest", f"{self.doctest_files}"),
        ]


def is_bare(name: str) -> bool:
    """Return whether a function's name consists of participles, adverbs, prepositions and the like alone.

    >>> is_bare("told"), is_bare("_made_again"), is_bare("beside"), is_bare("taking_turns"), is_bare("read")
    (True, True, True, False, False)
    """
    if name.startswith("__") and name.endswith("__"):
        return False
    words = [word for word in name.strip("_").lower().split("_") if word]
    return bool(words) and all(_says_nothing(word) for word in words)


def _says_nothing(word: str) -> bool:
    if word in FUNCTION_WORDS or word in ADJECTIVES:
        return True
    if word in IRREGULAR_PARTICIPLES:
        return word not in PARTICIPLES_THAT_ARE_VERBS_TOO
    if word.endswith("ed"):
        return word not in NOUNS_AND_VERBS_IN_ED
    return word.endswith("ing") and word not in NOUNS_IN_ING


def python_files(folders: Sequence[str | Path]) -> Iterator[Path]:
    """Yield the Python files below each folder, in order of their paths."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not any(part.startswith(".") for part in path.relative_to(ROOT / folder).parts):
                yield path


def code_figures(folders: Sequence[str | Path] = PRODUCT) -> CodeFigures:
    """Count over all Python files below `folders`, which are relative to the checkout."""
    figures = CodeFigures()
    for path in python_files(folders):
        _count_file(figures, path)
    return figures


def _count_file(figures: CodeFigures, path: Path) -> None:
    text = path.read_text()
    lines = text.splitlines()
    figures.lines += len(lines)
    figures.file_sizes.append(len(lines))
    figures.long_lines += sum(len(line) > 100 for line in lines)
    figures.comment_lines += sum(line.lstrip().startswith("#") for line in lines)
    figures.doctest_files += bool(re.search(r"^\s*>>> ", text, re.MULTILINE))
    tree = ast.parse(text)
    if not ast.get_docstring(tree):
        figures.silent_files.append(str(path))
    for node in ast.walk(tree):
        if isinstance(node, Function | ast.ClassDef):
            _count_docstring(figures, node)
        if isinstance(node, Function):
            figures.function_names[node.name] += 1
            figures.function_sizes.append(_lines_without_docstring(node))
        elif isinstance(node, ast.ClassDef):
            figures.class_places.setdefault(node.name.strip("_"), []).append(str(path))
        elif isinstance(node, Comprehension):
            figures.comprehensions += 1
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            figures.assignments += 1
            figures.vague_assignments += node.id in VAGUE_VALUES
        elif isinstance(node, ast.Import | ast.ImportFrom):
            figures.import_lines += (node.end_lineno or node.lineno) - node.lineno + 1


def _count_docstring(figures: CodeFigures, node: Function | ast.ClassDef) -> None:
    docstring = ast.get_docstring(node)
    if not docstring:
        return
    opener = docstring.split()[0].strip(",.:;")
    figures.docstrings += 1
    figures.docstring_lines += _docstring_length(node)
    figures.leaning_openings += opener in OPENERS_THAT_LEAN_ON_A_NAME
    if isinstance(node, Function):
        figures.function_docstrings += 1
        figures.verb_openings += opener in VERBS


def _lines_without_docstring(node: Function) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1 - _docstring_length(node)


def _docstring_length(node: Function | ast.ClassDef) -> int:
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return (first.end_lineno or first.lineno) - first.lineno + 1
    return 0


def _quantiles(sizes: list[int]) -> str:
    if len(sizes) < 2:
        return "too few"
    return f"{statistics.median(sizes):.0f} / {statistics.quantiles(sizes, n=10)[-1]:.0f} / {max(sizes)}"


def main(folders: Sequence[str]) -> None:
    """Print the figures of the product, or of the folders that are named."""
    figures = code_figures(folders or PRODUCT)
    for name, value in figures.rows():
        print(f"{name:48} {value}")
    for name, places in sorted(figures.classes_twice.items()):
        print(f"  class {name}: {', '.join(places)}")
    for name, count in sorted(figures.function_names.items()):
        if is_bare(name):
            print(f"  function {name} ({count})")


if __name__ == "__main__":
    main(sys.argv[1:])
