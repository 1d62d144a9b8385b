"""The report says what the run folder holds, whatever that is, and nothing a stranger smuggles into it."""

import io
import json
import math
import re
from base64 import b64encode
from hashlib import sha256
from html import unescape

import numpy as np
import pytest
import torch
from jinja2 import DictLoader, Environment
from PIL import Image
from safetensors.torch import save_file

from fedsim.audit.audit import Audit
from fedsim.audit.finding_files import save_finding
from fedsim.audit.scores import IMAGE_SCORE_COLUMNS, SCORE_COLUMNS
from fedsim.base.errors import ConfigError
from fedsim.federation.adversary_tables import AttackTable
from fedsim.federation.config import AttackFile, Config
from fedsim.federation.experiment import Experiment
from fedsim.federation.open_run import OpenRun
from fedsim.federation.table import PluginTable
from fedsim.interfaces.attack import Paper
from fedsim.interfaces.findings import Reconstruction, Representatives, Texts
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from fedsim.report import figures, pictures
from fedsim.report.charts import Look
from fedsim.report.curves import overlay_curves, training_charts
from fedsim.report.html import environment, render_page
from fedsim.report.page import write_report
from fedsim.report.panels.reproduction import bibtex
from tests.support.recordings import build_update

SME = AttackTable(name="sme")
CONFIG = {
    "data": {"name": "digits"},
    "partition": {"name": "iid", "samples_per_client": 3},
    "model": {"name": "mlp", "hidden": (4,)},
    "federation": {"clients": 2, "rounds": 3, "seed": 5},
}


def config(**tables):
    return Config.model_validate({**CONFIG, "attack": [SME], **tables})


def record(folder, rounds=(1, 2, 3), failures=None):
    recorder = Recorder(folder.transcript)
    for number in rounds:
        before = {"weight": torch.arange(6.0) + number}
        updates = [
            build_update(before, {"weight": torch.ones(6) * c}, round=number, client=c, num_examples=3 + c)
            for c in (0, 1)
        ]
        recorder.write(number, updates, failures or {}, {"local-epochs": 2})


CURVES = {"objective": torch.linspace(1, 0.01, 20), "l_sim": torch.linspace(0.9, 0.01, 20)}

FACTS = {
    "rounds": [1], "members": [], "first_round": 1, "settings": {}, "changed": {}, "partial_records": "",
    "knowledge": {}, "app": {},
    "fingerprint": "", "variant": "", "command": "", "code": None, "model_code": None, "warnings": [], "seconds": 1.0,
}  # fmt: skip


def claim(
    folder,
    data,
    *,
    attack="sme",
    plugin=None,
    number=1,
    victim=0,
    repeat=0,
    granted=("model", "loss"),
    trace=CURVES,
    kind=Reconstruction,
    label=0,
    variant="",
    settings=None,
):
    finding = kind(
        data=data,
        labels=torch.full((len(data),), label),
        trace=trace,
        snapshots=torch.stack([torch.rand_like(data), data]),
        snapshot_iterations=torch.tensor([0, 20]),
    )
    about = FACTS | {
        "attack": attack,
        "plugin": plugin or attack,
        "settings": settings or {},
        "round": number,
        "first_round": int(str(number).partition("-")[0]),
        "victim": victim,
        "repeat": repeat,
        "granted": list(granted),
        "variant": variant,
    }
    place = folder.findings / re.sub(r"\W", "", attack) / f"round-{number}-client-{victim}-repeat-{repeat}.safetensors"
    save_finding(finding, place, about)
    folder.manifest.note(place)
    return place.with_suffix(".png")


def claimed_otherwise(folder, variant, changed, **about):
    """Another finding of `sme`, made with other settings."""
    said = FACTS | {
        "attack": "sme",
        "plugin": "sme",
        "round": 1,
        "first_round": 1,
        "victim": 0,
        "repeat": 0,
        "granted": ["model"],
    }
    finding = Reconstruction(data=torch.rand(3, 1, 8, 8), labels=torch.zeros(3, dtype=torch.long), trace=CURVES)
    place = folder.findings / f"sme-{variant}" / "round-1-client-0-repeat-0.safetensors"
    save_finding(finding, place, said | {"variant": variant, "changed": changed} | about)


def measure(folder, rows):
    names = ("round", "client", "accuracy", "loss", "epsilon of dp-sgd", "epsilon of update-noise")[: len(rows[0])]
    folder.write_table(folder.metrics, names, [dict(zip(names, row, strict=True)) for row in rows])


def judge(folder, lines, victims=3):
    """Rows of `scores.csv` out of (attack, metric, value, floor, guess), each for so many victims."""
    rows = [
        dict(zip(SCORE_COLUMNS, (attack, victim, 1, 0, metric, value + victim / 1000, floor, guess), strict=False))
        | {
            "examples": 4,
            "nearest_public": "nan",
            "ceiling": 1,
            "higher_is_better": True,
            "missing": "",
            "instrument": "",
        }
        | {"variant": FACTS["variant"], "settings": "{}", "granted": "model loss"}
        for attack, metric, value, floor, guess in lines
        for victim in range(victims)
    ]
    folder.write_table(folder.scores, SCORE_COLUMNS, rows)


def judge_images(folder, attack, metric, values):
    """Rows of `image-scores.csv` about the first finding of client 0."""
    rows = [
        dict(
            zip(
                IMAGE_SCORE_COLUMNS,
                (attack, 0, 1, 0, place, metric, value, FACTS["variant"], "{}", "model"),
                strict=True,
            )
        )
        for place, value in enumerate(values)
    ]
    folder.write_table(folder.images, IMAGE_SCORE_COLUMNS, rows)


def claim_texts(folder, tokens, *, attack):
    finding = Texts(tokens=torch.tensor(tokens), labels=torch.zeros(len(tokens), dtype=torch.long))
    about = FACTS | {
        "attack": attack,
        "plugin": attack,
        "round": 1,
        "first_round": 1,
        "victim": 0,
        "repeat": 0,
        "granted": ["model", "labels"],
    }
    place = folder.findings / attack / "round-1-client-0-repeat-0.safetensors"
    save_finding(finding, place, about)
    folder.manifest.note(place)


@pytest.fixture
def folder(tmp_path):
    run = OpenRun(tmp_path / "run")
    run.path.mkdir()
    return run


@pytest.fixture(scope="module")
def held():
    """What client 0 holds under CONFIG."""
    return Experiment(config()).data.train(0)[0]


def page(folder, audit=None):
    return write_report(OpenRun(folder.path), audit).read_text(encoding="utf-8")


def text_of(html):
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", re.sub(r"(?s)<(script|style)>.*?</\1>", " ", html))).split())


def scripts(html):
    return re.findall(r"(?s)<script>(.*?)</script>", html)


def test_no_line_ends_between_a_number_and_its_percent_sign(monkeypatch):
    """What is copied keeps its space, and so does a script, which a hash allows."""
    kept = "<script>let x = 7 % 2</script><pre>\n--set a='5 %'</pre><code>5 %</code>"
    pages = Environment(loader=DictLoader({"page": f'<p title="1 %">95 %, {{{{ 0.5 | percent }}}}</p>{kept}5 %'}))
    pages.filters |= environment().filters
    monkeypatch.setattr("fedsim.report.html.environment", lambda: pages)
    assert render_page("page") == f'<p title="1\u00a0%">95\u00a0%, 50.0\u00a0%</p>{kept}5\u00a0%'


def test_a_normal_run_is_told_from_floor_to_citation(folder, held):
    folder.write_experiment(config())
    record(folder)
    png = claim(folder, held.flip(0), variant="0a1b")
    right = {(2, "server"): 0.75}
    rows = [(r, c, right.get((r, c), 0.5), 1.0) for r in (1, 2) for c in ("server", 0, 1)]
    measure(folder, rows)
    Audit(folder=folder, spec=AttackFile(), experiment=Experiment(config()), base_folder=folder.path).score()
    html = page(folder)
    text = text_of(html)
    assert png.is_file()
    for words in (
        "mlp; 2 clients; 3 rounds; N at most",
        "The attacks used the messages of client 0 in round 1 of 3.",
        "From the messages of 1 victim, the server recovered all 3 images exactly (by sme). "
        "By share exact, sme finds a leak. By PSNR, sme is beyond the floor. If messages revealed nothing, each single "
        "claim of a leak (one attack, one metric) would be made in at most 5 % of cases; a false claim among several "
        "is more likely. The model",
        "From fewer than 5 victims, only examples that are matched",
        "mlp (hidden [4]): 310 parameters",
        "2 clients, 3 rounds, fedavg",
        "Defenses none",
        "model a function that builds the architecture whose weights the server broadcasts granted sme",
        "labels the victim's labels in ascending order; an attack that splits them into mini-batches shuffles them "
        "withheld – –",
        "The model's final accuracy on the public test set is 75.0 % (after round 2).",
        "a single image may leak where the mean does not, so look at the pictures",
        "3 rounds,",
        "Zhu, Yao, Blaschko: Surrogate Model Extension (SME)",
        "@inproceedings{Zhu2023",
    ):
        assert words in text
    titles = re.findall(r'<figure class="chart">\s*<figcaption>(.*?)</figcaption>', html)
    assert titles[:2] == ["Accuracy", "Loss"]
    assert [title.split()[0] for title in titles[2:]] == ["What", "Direction", "Closeness"]  # objective, L_sim, PSNR
    assert "hidden = [" in text  # the experiment file, verbatim


def test_what_to_do_next_follows_from_who_attacked_by_which_command(folder, held):
    folder.write_experiment(config())
    record(folder)
    claim(folder, held.flip(0), variant="0a1b")
    judge(folder, [("sme", "psnr", 9.0, 10.0, "noise")], victims=1)
    experiment, command = Experiment(config()), "fedsim attack RUN mine.toml"
    for who, words in (
        ("outsider", f"federation.seed={config().federation.seed + 1} --out RUN-seed-"),
        ("server", f"{command} --set 'adversary.victims=\"all\"'"),
    ):
        spec = AttackFile.model_validate({"adversary": {"who": who}})
        audit = Audit(folder=folder, spec=spec, experiment=experiment, base_folder=folder.path, command=command)
        text = text_of(page(folder, audit))
        assert words in text
        assert "mine.toml" in text


def test_each_attack_is_judged_by_its_main_metric(folder):
    """`embedding-rows` tells which words there are; that it does not know their places is not its failure."""
    record(folder)
    claim_texts(folder, [[1, 2], [3, 4]], attack="embedding-rows")
    claim_texts(folder, [[1, 2], [3, 4]], attack="dlg-text")
    metrics = ("recover_rate", "tokens_found", "words_found")
    words = [
        ("embedding-rows", name, value, 0.5, "frequent words")
        for name, value in zip(metrics, (0.1, 0.6, 0.9), strict=True)
    ]
    texts = [
        ("dlg-text", name, value, 0.5, "frequent words") for name, value in zip(metrics, (0.8, 0.6, 0.2), strict=True)
    ]
    judge(folder, words + texts)
    text = text_of(page(folder))
    assert (
        "By words found, embedding-rows is beyond the floor. By recover rate, dlg-text is beyond the floor. "
        "Only 3 victims were attacked, too few to conclude from."
    ) in text
    assert "embedding-rows words found 0.901" in text
    assert "dlg-text recover rate 0.801" in text


def test_a_main_metric_that_could_not_be_computed_leaves_the_others(folder):
    record(folder)
    claim_texts(folder, [[1, 2]], attack="embedding-rows")
    judge(folder, [("embedding-rows", "tokens_found", 0.6, 0.5, "frequent words")])
    assert "By tokens found, embedding-rows is beyond the floor." in text_of(page(folder))


@pytest.fixture
def texts_of_a_stranger(folder, tmp_path):
    """An audit whose client 0 held [[7, 8, 9], [7, 5, 0]], where 0 is padding."""
    record(folder)
    held = {"tokens": torch.tensor([[7, 8, 9], [7, 5, 0]]), "labels": torch.zeros(2, dtype=torch.long)}
    save_file(held | {"padding": torch.tensor(0)}, tmp_path / "truth.safetensors")
    spec = AttackFile(attack=[AttackTable(name="embedding-rows")], truth={"0": "truth.safetensors"})
    return Audit(folder=folder, spec=spec, experiment=None, base_folder=tmp_path)


def test_a_bag_of_words_is_shown_as_a_set_and_not_as_texts_with_errors(folder, texts_of_a_stranger):
    claim_texts(folder, [[9, 8, 7], [4, 0, 9]], attack="embedding-rows")
    html = page(folder, texts_of_a_stranger)
    assert "true: words of all texts 7 8 9 5 embedding-rows 1.0 s words of all texts 9 8 7 4" in text_of(html)
    assert re.findall("<del>(.*?)</del>", html) == ["4"]
    assert re.findall(r"<mark>(\d)</mark>", html) == ["9", "8", "7"]
    assert "shown as a set; words that are in one of the true texts are marked" in text_of(html)
    assert "matched one-to-one" not in text_of(html)


def test_claimed_texts_are_compared_place_by_place(folder, texts_of_a_stranger):
    claim_texts(folder, [[9, 5, 0], [7, 8, 8]], attack="dlg-text")
    html = page(folder, texts_of_a_stranger)
    assert re.findall("<del>(.*?)</del>", html) == ["8", "9"]
    assert "matched one-to-one" in text_of(html)
    assert "shown as a set" not in text_of(html)


def test_a_true_text_stands_once_and_what_each_attack_claims_below_it(folder, texts_of_a_stranger):
    claim_texts(folder, [[9, 5, 0], [7, 8, 8]], attack="dlg-text")
    claim_texts(folder, [[7, 8, 9], [7, 5, 0]], attack="tgias-ro-text")
    html = page(folder, texts_of_a_stranger)
    [table] = re.findall('<table class="texts">(.*?)</table>', html, re.DOTALL)
    first = "true 7 8 9 dlg-text 1.0 s 7 8 8 tgias-ro-text 1.0 s 7 8 9"
    assert text_of(table) == f"{first} true 7 5 dlg-text 1.0 s 9 5 tgias-ro-text 1.0 s 7 5"
    assert re.findall("<del>(.*?)</del>", table) == ["8", "9"]


def test_a_true_record_stands_once_and_what_each_attack_claims_below_it(folder, tmp_path):
    record(folder)
    held = {"data": torch.tensor([[0.1, 0.9], [0.5, 0.2]]), "labels": torch.zeros(2, dtype=torch.long)}
    save_file(held, tmp_path / "truth.safetensors")
    claim(folder, torch.tensor([[0.5, 0.7], [0.1, 0.9]]), attack="dlg")
    claim(folder, torch.tensor([[0.1, 0.88], [0.5, 0.2]]), attack="sme")
    spec = AttackFile(attack=[AttackTable(name="sme")], truth={"0": "truth.safetensors"})
    html = page(folder, Audit(folder=folder, spec=spec, experiment=None, base_folder=tmp_path))
    [table] = re.findall('<table class="records">(.*?)</table>', html, re.DOTALL)
    assert text_of(table) == (
        "feature 0 feature 1 true 0.1 0.9 dlg 0.1 0.9 sme 0.1 0.88 true 0.5 0.2 dlg 0.5 0.7 sme 0.5 0.2"
    )
    assert re.findall("<del>(.*?)</del>", table) == ["0.88", "0.7"]
    assert table.count("<mark>") == 6


def on_cards(html):
    """What is told of the examples on each card, and their words."""
    return [text_of(card) for card in re.findall('<ul class="examples written">(.*?)</ul>', html, re.DOTALL)]


def test_a_card_shows_the_best_and_the_worst_record(folder, tmp_path):
    record(folder)
    held = {"data": torch.tensor([[0.1, 0.9], [0.5, 0.2]]), "labels": torch.zeros(2, dtype=torch.long)}
    save_file(held, tmp_path / "truth.safetensors")
    claim(folder, torch.tensor([[0.1, 0.9], [0.5, 0.7]]))
    judge(folder, [("sme", "mse", 0.06, 0.1, "noise")])
    judge_images(folder, "sme", "mse", [0.0, 0.125])
    spec = AttackFile(attack=[AttackTable(name="sme")], truth={"0": "truth.safetensors"})
    html = page(folder, Audit(folder=folder, spec=spec, experiment=None, base_folder=tmp_path))
    assert on_cards(html) == [
        "best MSE 0; client 0, round 1 feature 0 0.1, feature 1 0.9 feature 0 0.1 feature 1 0.9 "
        "worst MSE 0.125; client 0, round 1 feature 0 0.5, feature 1 0.2 feature 0 0.5 feature 1 0.7"
    ]


def test_a_card_shows_which_words_were_found(folder, texts_of_a_stranger):
    claim_texts(folder, [[9, 8, 7], [4, 0, 9]], attack="embedding-rows")
    judge(folder, [("embedding-rows", "words_found", 0.75, 0.5, "frequent words")], victims=1)
    judge_images(folder, "embedding-rows", "recover_rate", [0.0, 0.25])
    [told] = on_cards(page(folder, texts_of_a_stranger))
    assert told == "best words found 0.75; client 0, round 1 7 8 9 5 9 8 7 4"


def test_a_long_text_is_cut_on_its_card(folder, tmp_path):
    record(folder)
    held = {"tokens": torch.arange(100, 150).reshape(1, 50), "labels": torch.zeros(1, dtype=torch.long)}
    save_file(held, tmp_path / "truth.safetensors")
    claim_texts(folder, held["tokens"].tolist(), attack="dlg-text")
    judge(folder, [("dlg-text", "recover_rate", 1.0, 0.5, "frequent words")])
    judge_images(folder, "dlg-text", "recover_rate", [1.0])
    spec = AttackFile(attack=[AttackTable(name="dlg-text")], truth={"0": "truth.safetensors"})
    html = page(folder, Audit(folder=folder, spec=spec, experiment=None, base_folder=tmp_path))
    beginning = " ".join(map(str, range(100, 140)))
    assert on_cards(html) == [f"best recover rate 1; client 0, round 1 {beginning} … {beginning} …"]
    assert "148 149" in text_of(html.split('id="texts"')[1])


def test_the_notes_of_a_run_on_texts_speak_of_texts(folder, texts_of_a_stranger):
    claim_texts(folder, [[9, 8, 7], [4, 0, 9]], attack="embedding-rows")
    judge(folder, [("embedding-rows", "words_found", 0.9, 0.5, "frequent words")])
    text = text_of(page(folder, texts_of_a_stranger))
    assert "a single text may leak where the mean does not, so look at the texts" in text
    assert not re.search("images?|pictures?|PSNR of", text.split("What leaked")[1].split("Threat model")[0])


def test_too_many_words_are_cut_and_said_to_be(folder):
    record(folder)
    claim_texts(folder, [list(range(1, 401))], attack="embedding-rows")
    text = text_of(page(folder))
    assert "The first 300 of 400 words" in text
    assert "299 300" in text
    assert " 301 " not in text


def test_the_page_quotes_one_reading_everywhere(folder):
    record(folder)
    claim(folder, torch.rand(3, 1, 2, 2))
    judge(folder, [("sme", "psnr", 12.0, 15.0, "noise"), ("sme", "label_accuracy", 0.9, 0.5, "guess")], victims=6)
    html = page(folder)
    assert re.findall(r'<span class="(.*?)">(?:\1)</span>\s*<div class="small">(.*?)</div>', html) == [
        ("no better than guessing", "0 of 6 victims beyond the floor"),
        ("leaks", "6 of 6 victims"),
    ]
    assert "By label accuracy, sme finds a leak. By PSNR, sme is no better than guessing." in text_of(html)
    assert "did better" not in html
    assert "0.9025 (0." in text_of(html)


def test_nothing_is_bold_with_fewer_than_five_victims(folder):
    record(folder)
    claim(folder, torch.rand(3, 1, 2, 2))
    judge(folder, [("sme", "psnr", 25.0, 15.0, "noise")])
    html = page(folder)
    (verdict,) = re.findall(r'<span class="([^"]*floor)">', html)
    bold = re.findall(r"^  ([.\w, ]+){[^}]*font-weight: 6[^}]*}", html, re.MULTILINE)
    assert verdict == "beyond the floor"
    assert not any(f".{name}" in rule for rule in bold for name in verdict.split())


def test_baselines_and_models_of_the_evaluator_are_told_apart_on_the_page(folder):
    record(folder)
    for title, source in (("proxy", "global"), ("best", "optimal")):
        claim(folder, torch.rand(3, 1, 2, 2), attack=title, settings={"source": source})
    judge(folder, [(title, "zest", 0.9, 0.5, "global model") for title in ("lmra", "proxy", "best")], victims=6)
    text = text_of(page(folder))
    assert "By Zest, lmra finds a leak. Baselines are not counted as attacks. By Zest, proxy finds a leak." in text
    assert "no attack: it reads the victim's optimal local model" in text
    assert "higher, 1 by the optimal local model" in text
    assert "ceiling" not in text


def test_the_verdict_stands_beside_its_floor_and_a_long_guess_may_wrap(folder):
    record(folder)
    claim(folder, torch.rand(3, 1, 2, 2))
    judge(folder, [("sme", "ssim", 0.9, 0.5, "a guess of a rather long name")])
    html = page(folder)
    (line,) = re.findall(r'<tr>\s*<th scope="row" data-value.*?</tr>', html, re.DOTALL)
    cells = re.findall(r"<td(.*?)>(.*?)</td>", line, re.DOTALL)
    floor, verdict = (next(i for i, cell in enumerate(cells) if word in cell[1]) for word in ("rather long", "beyond"))
    assert verdict == floor + 1
    assert "number" not in "".join(cells[floor])
    assert "nowrap" not in re.findall(r"thead th {(.*?)}", html)[0]


@pytest.mark.parametrize(
    ("metric", "floor"),
    [
        (
            "psnr",
            "For examples and labels, the floor is the score of the best of several guesses that do not use any update",
        ),
        ("zest", "For local models, the floor is the score of the best model that was sent"),
        ("source_accuracy", "For sources, the floor is the score of a client drawn at random"),
        ("attribute_accuracy", "For attributes, the floor is the better of two guesses that use no message"),
    ],
)
def test_the_page_says_what_the_floor_is_of_what_is_shown(folder, metric, floor):
    """Models that were sent are no guesses that never look at an update."""
    record(folder)
    judge(folder, [("theirs", metric, 0.9, 0.5, "a guess")])
    text = text_of(page(folder))
    assert floor in text
    assert len(re.findall("For [a-z ]+, the floor is", text)) == 1


@pytest.mark.parametrize(
    ("granted", "told"),
    [
        ({}, "to show the originals."),
        ({"labels": True}, "this threat model grants some of the victims' data: labels."),
        (
            {"records": True, "partial_records": "sensitive"},
            "but this threat model grants some of the victims' data: records and all columns of records but one.",
        ),
    ],
)
def test_what_is_granted_of_the_truth_is_told_at_once(folder, granted, told):
    record(folder)
    folder.write_experiment(config(adversary={"knowledge": granted}))
    assert told in text_of(page(folder)).split("What leaked")[0]


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (
            [(1, "server", 0.1, 2.0), (2, "server", "", ""), (2, 0, 0.5, 1.0)],
            "accuracy on what one client holds out is 50.0 %",
        ),
        ([(1, "server", "", 2.5), (3, "server", "", 1.5)], "final loss on the public test set is 1.5 (after round 3)"),
        ([(9, "server", 0.5, 2.0), (10, "server", 0.25, 2.0)], "on the public test set is 25.0 % (after round 10)"),
        ([(1, 0, 0.5, 1.0), (1, 1, 1.0, 1.0)], "what 2 clients hold out, on average, is 75.0 % (after round 1)"),
    ],
)
def test_the_final_accuracy_stands_in_the_headline(folder, rows, sentence):
    record(folder)
    measure(folder, rows)
    assert sentence in text_of(page(folder)).split("What leaked")[0]


@pytest.mark.parametrize(("accuracy", "is_said"), [(0.105, True), (0.9, False)])
def test_a_model_that_has_not_learnt_is_said_to_be_so_at_once(folder, accuracy, is_said):
    record(folder)
    row = {"round": 3, "client": "server", "accuracy": accuracy, "guess": 0.11, "num_examples": 200}
    folder.write_table(folder.metrics, tuple(row), [row])
    assert ("The model has not learnt: its accuracy on 200" in text_of(page(folder)).split("What leaked")[0]) == is_said


def test_an_accuracy_on_some_of_the_examples_is_not_said_to_be_on_all(folder):
    folder.write_experiment(config(federation={"clients": 2, "rounds": 3, "evaluate_examples": 40}))
    record(folder)
    measure(folder, [(1, "server", 0.5, 2.0)])
    assert "accuracy on at most 40 examples of the public test set is 50.0 %" in text_of(page(folder))


def test_what_was_spent_stands_beside_the_accuracy(folder):
    record(folder)
    measure(folder, [(1, "server", 0.5, 2.0, 3.0, 1.0), (2, "server", 0.75, 1.0, 4.25, 9.0), (2, 0, 0.5, 1.0, "", "")])
    shown = text_of(page(folder))
    assert (
        "largest proved ε of dp-sgd is 4.25, ε of update-noise is 9 (after round 2)." in shown.split("What leaked")[0]
    )
    assert "Privacy spent: largest proved ε of dp-sgd of a client" in shown
    assert "the client that has spent most privacy" in shown


def test_without_a_proof_nothing_is_said_to_be_spent(folder):
    record(folder)
    measure(folder, [(1, "server", 0.5, 2.0)])
    shown = text_of(page(folder))
    assert "proved" not in shown
    assert "Privacy spent" not in shown


def test_pictures_of_classes_are_not_said_to_be_matched(folder, held):
    folder.write_experiment(config())
    record(folder)
    held_labels = Experiment(config()).data.train(0)[1].tolist()
    claim(folder, held[:1].flip(0), attack="sra-gradient", kind=Representatives, label=held_labels[0])
    begin = "Pictures Originals above, reconstructions below. "
    classes = (
        "Where an attack claims what a class looks like, the original is the most similar image that the "
        "victim has of that class. "
    )
    assert begin + classes + "Numbers" in text_of(page(folder))
    claim(folder, held)
    matched = "They are matched one-to-one so that their total PSNR is largest, because attacks do not know the order. "
    text = text_of(page(folder))
    assert begin + matched + classes + "Numbers" in text
    assert "reconstructions by sra-gradient of client 0 in round 1" in text
    assert "reconstructions by sme of client 0 in round 1" in text  # whose originals are others


def test_titles_with_commas_stay_apart(folder):
    record(folder)
    judge(folder, [(title, "class_ssim", 0.9, 0.5, "mean image") for title in ("sra, global", "sra, optimal")])
    assert "By class SSIM, 'sra, global' and 'sra, optimal' are beyond the floor." in text_of(page(folder))


def test_legends_name_only_what_is_drawn(folder):
    record(folder)
    measure(folder, [(1, "server", 0.5, 2.0), (2, "server", 0.6, 1.5)])
    claim(folder, torch.rand(3, 1, 2, 2))
    claim(folder, torch.rand(3, 1, 2, 2), attack="inverting-gradients", trace={})
    assert legends(page(folder)) == ["server, on the public test set", "sme"]
    measure(folder, [(1, "server", 0.5, 2.0), (1, 0, 0.6, 1.5)])
    assert legends(page(folder))[1].startswith("clients, each on what it holds out")


def legends(html):
    return [unescape(name) for name in re.findall(r'<li><svg class="key".*?</svg>(.*?)</li>', html)]


def test_a_run_that_was_never_evaluated_claims_no_accuracy(folder):
    record(folder)
    measure(folder, [(1, "server", "", "")])
    assert "The model's final" not in text_of(page(folder))


def test_who_used_what_was_granted_is_told_apart_from_who_needs_it(folder):
    record(folder)
    claim(folder, torch.rand(3, 1, 2, 2), granted=["model", "labels"])
    claim(folder, torch.rand(3, 1, 2, 2), attack="sra-gradient", granted=["model", "batch_size"])
    text = text_of(page(folder))
    assert "in ascending order; an attack that splits them into mini-batches shuffles them granted – sme" in text
    assert "batch_size B, examples in one local step to sra-gradient only sra-gradient –" in text
    assert "builds the architecture whose weights the server broadcasts granted sme, sra-gradient –" in text


def test_a_finding_that_is_drawn_and_not_scored_is_told_from_the_others_everywhere(folder):
    """In the table, whose rows are all of one variant, as well as under the pictures; and so is a score left alone."""
    record(folder)
    claimed_otherwise(folder, "aaaa", {"iterations": 7})
    claimed_otherwise(folder, "bbbb", {"iterations": 9})
    row = dict(zip(SCORE_COLUMNS, ("sme", 0, 1, 0, "psnr", 12.0, 9.0, "mean"), strict=False)) | {"granted": "model"}
    row |= {
        "examples": 4,
        "ceiling": 1,
        "higher_is_better": True,
        "missing": "",
        "instrument": "",
        "nearest_public": "nan",
    }
    folder.write_table(folder.scores, SCORE_COLUMNS, [row | {"variant": "aaaa", "settings": '{"iterations": 7}'}])
    page = write_report(OpenRun(folder.path)).read_text()
    assert '<th scope="row" data-value="sme (iterations=7)">sme (iterations=7)</th>' in page
    assert all(f'<th scope="row">sme (iterations={count})<span' in page for count in (7, 9))
    folder.write_table(folder.scores, SCORE_COLUMNS, [row | {"variant": "gone", "settings": '{"iterations": 8}'}])
    (folder.findings / "sme-bbbb" / "round-1-client-0-repeat-0.safetensors").unlink()
    page = write_report(OpenRun(folder.path)).read_text()
    assert '<th scope="row" data-value="sme (iterations=8)">sme (iterations=8)</th>' in page
    assert '<th scope="row">sme (iterations=7)<span' in page


def test_before_any_attack_what_is_granted_is_told_beside_who_declares_it(folder):
    folder.write_experiment(config())
    record(folder)
    text = text_of(page(folder))
    assert "number of classes granted – –" in text
    assert "step size of the clients' local training granted – sme" in text


def threat_model(html):
    """The three sentences, and what is marked in them."""
    [told] = re.findall('<section id="threats">.*?<p>(.*?)</p>', html, re.DOTALL)
    return text_of(told), re.findall("<mark>(.*?)</mark>", told)


def test_the_threat_model_is_told_in_three_sentences_with_what_is_unusual_marked(folder):
    knowledge = {"labels": True, "momentum": False}
    folder.write_experiment(config(adversary={"knowledge": knowledge}))
    record(folder)
    claim(folder, torch.rand(3, 1, 8, 8), granted=("model", "loss", "labels"))
    told, marked = threat_model(page(folder))
    assert "As usual, it also knows: model, loss" in told
    assert "; but not momentum. Unusually, it is also granted labels (" in told
    assert marked == ["labels"]


def test_where_nothing_unusual_is_granted_that_is_said(folder):
    folder.write_experiment(config())
    record(folder)
    claim(folder, torch.rand(3, 1, 8, 8))
    told, marked = threat_model(page(folder))
    assert "It is granted no unusual knowledge: no data of a victim, and not the clients’ defenses." in told
    assert marked == []


def test_who_sent_nothing_and_how_often_is_told(folder):
    record(folder, failures=dict.fromkeys(range(2, 10), "late"))
    often = ", ".join(f"client {client} in 3 rounds" for client in range(2, 8))
    assert (
        "In 3 of 3 rounds clients sent nothing, because they were late, failed or withheld their update: "
        f"{often}, and 2 more clients."
    ) in text_of(page(folder))


def test_how_often_clients_are_late_is_told_beside_their_number(folder):
    folder.write_experiment(config(federation={"clients": 2, "rounds": 3, "straggler_probability": 0.25}))
    assert "2 clients, 3 rounds, each a straggler with probability 0.25, fedavg" in text_of(page(folder))


def test_the_geometry_that_was_measured_is_told(folder):
    record(folder)
    assert "Geometry of local training" not in page(folder)
    rows = [{"round": 1, "client": client, "max cosine": value} for client, value in enumerate((0.5, 0.75, 1.0))]
    folder.write_table(folder.path / "geometry.csv", ("round", "client", "max cosine"), rows)
    assert "of 3 updates: Quantity Mean Lowest Highest max cosine 0.75 0.5 1" in text_of(page(folder))


def test_the_colour_of_a_card_is_that_of_its_worst_reading(folder):
    record(folder)
    readings = {"leaks": 0.9, "undecided": 0.498, "quiet": 0.1}
    judge(folder, [(attack, "ssim", value, 0.5, "noise") for attack, value in readings.items()], victims=6)
    cards = re.findall(r'<article class="card (\w+)">\s*<h2>(\w+)</h2>\s*<p class="verdict">(.*?)</p>', page(folder))
    assert cards == [
        ("leak", "leaks", "leaks"),
        ("doubt", "undecided", "undecided"),
        ("calm", "quiet", "no better than guessing"),
    ]


def test_a_claim_about_a_table_has_no_picture_and_no_psnr(folder):
    tables = config(data={"name": "leaf-synthetic"})
    folder.write_experiment(tables)
    record(folder)
    png = claim(folder, torch.rand(3, 100))
    assert "sme" in text_of(page(folder))
    assert not png.exists()


def test_what_a_victim_held_is_judged_in_the_unit_range_that_attacks_claim_it_in(folder):
    tables = Experiment(config(data={"name": "leaf-synthetic"}))
    audit = Audit(folder=folder, spec=tables.config, experiment=tables, base_folder=folder.path)
    low, high = tables.dataset.input_bounds
    assert (low < high).all()
    assert (low < 0).any() & (high > 1).any()
    truth, public = audit.case.truth(0, 1).data, audit.case.public().data
    for data, held in ((truth, tables.data.train(0)[0]), (public, tables.dataset.test.inputs()[:5000])):
        assert 0 <= data.min() < data.max() <= 1
        assert torch.allclose(low + data * (high - low), held, atol=1e-4)


def test_the_page_and_the_command_line_say_the_same_hash(folder):
    record(folder)
    assert Transcript(folder.path).hash()[:16] in page(folder)


def test_the_page_needs_nothing_but_itself(folder, held):
    folder.write_experiment(config())
    record(folder)
    claim(folder, held)
    html = page(folder)
    addresses = re.findall(r'(?:src="|url\()([^")]*)', html)
    assert {address[:22] for address in addresses} == {"data:image/png;base64,"}
    assert not re.search(
        r"<link|@import|url\((?!data:)|srcset|http-equiv=\"refresh|fetch\(|XMLHttpRequest|import\(", html
    )
    assert "default-src 'none'" in html
    allowed = re.findall(r"'sha256-(.*?)'", unescape(html))
    assert [b64encode(sha256(script.encode()).digest()).decode() for script in scripts(html)] == allowed
    assert html == page(folder)


def test_what_strangers_wrote_is_escaped_everywhere(folder, held):
    hostile = '"><script>alert(1)</script>$_{{ 7 * 1911 }}'
    folder.write_experiment(config())
    folder.note_experiment(config(defense=[PluginTable(name=hostile)]))  # which imports nothing
    with folder.experiment.open("a") as file:
        file.write(f"# </pre>{hostile}\n")
    (folder.path / "versions.json").write_text(json.dumps({hostile: hostile}))
    record(folder, failures={7: f"KeyError: {hostile}"})
    claim(folder, held, attack=hostile)
    html = page(folder)
    assert html.count("<script") == len(scripts(html))
    assert not any("alert(1)" in script or "{{" in script for script in scripts(html))
    assert html.count("&lt;script&gt;alert(1)") >= 6
    assert "13377" not in re.sub(r'"data:[^"]*"', "", html)
    assert "client 7: KeyError" in text_of(html)


def test_a_bare_recording_is_enough(folder):
    record(folder)
    text = text_of(page(folder))
    assert "a recording without an experiment file" in text
    assert "2 recorded clients, 3 readable rounds" in text
    assert "6 values in each message" in text
    assert "No attack has been run on this recording. fedsim attack RUN ATTACK.toml" in text


def test_findings_without_truth_are_shown_alone_and_not_scored(folder, held):
    record(folder)
    png = claim(folder, held, granted=["model"])
    text = text_of(page(folder))
    assert "The reconstructions below have no scores" in text
    assert "There are no scores, because the victims' data are unknown" in text
    assert "Pictures Only reconstructions are shown, because the originals are not known here. Earlier" not in text
    assert "Pictures Only reconstructions are shown, because the originals are not known here." in text
    assert "original the client’s data" not in text
    assert "loss the clients' loss, a function of logits and labels that returns the mean withheld sme" in text
    assert Image.open(png).size[1] < 150


def test_an_audit_brings_the_truth_about_a_recording_made_elsewhere(folder, held, tmp_path):
    record(folder)
    png = claim(folder, held)
    save_file({"data": held, "labels": torch.zeros(len(held), dtype=torch.long)}, tmp_path / "truth.safetensors")
    spec = AttackFile(attack=[SME], truth={"0": "truth.safetensors"})
    text = text_of(page(folder, Audit(folder=folder, spec=spec, experiment=None, base_folder=tmp_path)))
    assert "Originals above, reconstructions below" in text
    assert "truth.safetensors" in text
    assert Image.open(png).size[1] > 200


def test_damaged_rounds_are_named_and_the_others_told(folder):
    record(folder)
    flipped, cut = (folder.transcript / f"round-00000{n}.safetensors" for n in (1, 2))
    content = bytearray(flipped.read_bytes())
    content[-1] ^= 1
    flipped.write_bytes(content)
    cut.write_bytes(cut.read_bytes()[:40])
    failures: list[str] = []
    text = text_of(write_report(OpenRun(folder.path), None, failures).read_text())
    assert "Round 1 is damaged" in text
    assert "Round 2 is damaged" in text
    assert len(failures) == 2
    assert all(f"round-00000{n}.safetensors" in told for n, told in enumerate(failures, 1))
    assert "3 rounds, 0.0 MB; 2 damaged (1, 2). SHA-256 of the intact rounds:" in text


def test_a_damaged_finding_or_a_missing_data_set_does_not_stop_the_report(folder, held, monkeypatch):
    monkeypatch.delenv("FEDSIM_DATA", raising=False)
    noise = PluginTable(name="update-noise", clip=1.0, noise_multiplier=0.0)
    folder.write_experiment(config(data={"name": "mnist"}, defense=[noise]))
    record(folder)
    claim(folder, held)
    (folder.findings / "sme" / "broken.safetensors").write_bytes(b"nothing")
    text = text_of(page(folder))
    assert "broken.safetensors is left out" in text
    assert "needs a data folder" in text
    assert "update-noise (clip 1.0, noise_multiplier 0.0): no formal guarantee" in text


NOISE = PluginTable(name="update-noise", clip=1.0, noise_multiplier=0.1)


def test_naive_and_adaptive_stand_side_by_side(folder):
    folder.write_experiment(config(defense=[NOISE], adversary={"knowledge": {"defenses": True}}))
    record(folder)
    judge(folder, [("sme", "psnr", 12.0, 15.0, "noise"), ("sme adaptive", "psnr", 20.0, 15.0, "noise")], victims=6)
    rows = folder.scores.read_text(encoding="utf-8").splitlines()
    folder.scores.write_text(
        "\n".join(f"{row} defenses" if row.startswith("sme adaptive") else row for row in rows), encoding="utf-8"
    )
    html = page(folder)
    text = text_of(html)
    assert "Against sme, by PSNR, the clients' defense beats only the naive attack" in text
    beside = text.partition("Adaptive less naive, paired Defense More leakage is ")[2]
    scores = "sme PSNR, dB 12 ± 0.002 (n = 6) no better than guessing 20 ± 0.002 (n = 6) leaks 15 (noise) 8 ± "
    assert beside.startswith(scores)
    assert '<span class="leaks">beats only the naive attack</span>' in html
    assert "only naive attacks ran" not in text


def test_naive_and_adaptive_attacks_that_are_the_same_are_shown_once_and_told_apart_where_they_are_made(folder):
    folder.write_experiment(config(defense=[NOISE], adversary={"knowledge": {"defenses": True}}))
    record(folder)
    for attack, knows in (("sme", ()), ("sme adaptive", ("defenses",))):
        claim(folder, torch.rand(3, 1, 2, 2), attack=attack, plugin="sme", granted=("model", "loss", *knows))
    alike, other = [(name, "psnr", 12.0, 15.0, "noise") for name in ("sme", "sme adaptive")], 20.0
    for lines in (alike, [alike[0], (*alike[1][:2], other, *alike[1][3:])]):
        judge(folder, lines, victims=6)
        rows = folder.scores.read_text(encoding="utf-8").splitlines()
        folder.scores.write_text(
            "\n".join(f"{row} defenses" if row.startswith("sme adaptive") else row for row in rows), encoding="utf-8"
        )
        html, once = page(folder), lines is alike
        assert legends(html) == (["sme, naive and adaptive alike"] if once else ["sme", "sme adaptive"])
        assert ('<th scope="row" data-value="sme, naive and adaptive alike">' in html) == once
        made = text_of(html).partition(" Command ")[2]
        assert re.match(r"sme sme – .*?sme adaptive sme knows the clients’ defenses – ", made)


def test_bytes_on_the_wire_are_counted(folder):
    record(folder)
    text = text_of(page(folder))
    assert "Clients sent 144 bytes, 24 in each update on average, 4 for each number of the state." in text
    assert "Round Clients N, lowest to highest Bytes Failed 1 2 3 to 4 48 –" in text


def test_a_defended_run_says_that_only_naive_attacks_were_made(folder):
    folder.write_experiment(config(defense=[NOISE]))
    record(folder)
    claim(folder, torch.rand(3, 1, 2, 2))
    judge(folder, [("sme", "psnr", 12.0, 15.0, "noise")], victims=6)
    text = text_of(page(folder))
    assert "only naive attacks ran: the adversary is not granted the defenses" in text
    assert "Adaptive less naive" not in text
    folder.write_experiment(config())
    assert "naive attacks ran" not in text_of(page(folder))


def test_settings_that_defend_are_named_beside_the_defenses(folder):
    training = {"local_epochs": 1, "label_smoothing": 0.2, "batch_norm_statistics": "withheld"}
    strategy = {"name": "fedavg", "fraction_train": 0.5}
    folder.write_experiment(config(training=training, strategy=strategy))
    record(folder)
    used = "labels smoothed by 0.2, 0.5 of the clients sampled in a round: no formal guarantee"
    assert used in text_of(page(folder))  # this network has no statistics to withhold
    normalised = {"name": "mlp", "hidden": (4,), "batch_norm": True}
    folder.write_experiment(config(training=training, model=normalised))
    text = text_of(page(folder))
    assert "labels smoothed by 0.2, BatchNorm's running statistics withheld: no formal guarantee" in text
    assert "label smoothing 0.2" in text
    folder.write_experiment(config())
    assert "Settings that defend" not in text_of(page(folder))


def test_a_guarantee_is_stated_for_the_rounds_of_the_run(folder):
    noise = PluginTable(name="update-noise", clip=1.0, noise_multiplier=10.0)
    folder.write_experiment(config(defense=[noise]))
    record(folder)
    rho = 3 * 2 / 10.0**2
    epsilon = rho + 2 * math.sqrt(rho * math.log(1e5))
    assert f"ε = {epsilon:.3g}, δ = 1e-05 after 3 rounds" in page(folder)


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no run"):
        write_report(OpenRun(tmp_path))


def test_too_many_findings_and_images_are_cut_and_said_to_be(folder, monkeypatch):
    record(folder)
    pngs = [claim(folder, torch.rand(18, 1, 2, 2), victim=victim, repeat=n) for victim in (0, 1) for n in range(7)]
    text = text_of(page(folder))
    assert text.count("the first 16 of 18 images") == 14
    assert "lie as PNG files" not in text
    monkeypatch.setattr(pictures, "ROOM", 500)
    text = text_of(page(folder))
    assert all(png.is_file() for png in pngs)
    assert "The first 7 of 14 findings by round and victim; the other 7 lie as PNG files" in text
    assert text.count("the first 16 of 18 images") == 7


def test_findings_stand_in_the_order_of_their_rounds(folder):
    record(folder)
    for number in ("10", "2-5", "2"):
        claim(folder, torch.rand(1, 1, 2, 2), number=number)
    assert re.findall(r"<h3>Client 0, rounds? ([\d-]+)</h3>", page(folder)) == ["2", "2-5", "10"]


def test_each_original_stands_above_the_reconstruction_matched_to_it(folder, held):
    folder.write_experiment(config())
    record(folder)
    png = claim(folder, held.flip(0), variant="0a1b")
    page(folder)
    pixels = np.asarray(Image.open(png).convert("L")).astype(int)
    above, below = pixels[10:114, 200:-10], pixels[124:228, 200:-10]
    assert np.array_equal(above, below)
    first = np.round(held[0, 0].numpy() * 255).astype(int)
    assert np.abs(above[:, :104] - first.repeat(13, 0).repeat(13, 1)).max() <= 1  # squares of 13 x 13, not blurred


def test_colour_images_keep_their_colours():
    red = torch.zeros(1, 3, 4, 4)
    red[:, 0] = 1
    picture = Image.open(io.BytesIO(figures.draw_image_sheet(red, None, []))).convert("RGB")
    assert picture.getpixel((250, 50)) == (255, 0, 0)


def test_bibtex_escapes_what_tex_would_read():
    paper = Paper(title="Leaks & Noise_1", authors="Alpha, Beta", venue="IEEE Transactions on X", year=2020)
    assert bibtex(paper) == (
        "@misc{alpha2020leaks,\n  author = {Alpha and Beta},\n  title = {{Leaks \\& Noise\\_1}},\n"
        "  howpublished = {IEEE Transactions on X},\n  year = {2020},\n}"
    )


def test_curves_of_unequal_length_are_laid_over_one_another():
    short, long = (np.arange(2.0), np.array([1.0, 3.0])), (np.arange(3.0), np.array([3.0, math.nan, 5.0]))
    line = overlay_curves("sme", Look(0), [short, long])
    np.testing.assert_array_equal(line.x, [0, 1, 2])
    np.testing.assert_array_equal(line.y, [2, 3, 5])
    np.testing.assert_array_equal((line.low, line.high), [[1, 3, 5], [3, 3, 5]])


def test_attacks_do_not_share_a_style():
    assert len({(Look(place).colour, Look(place).dashes) for place in range(21)}) == 21


def test_a_run_that_never_evaluated_has_no_training_curves():
    assert not training_charts([{"round": "1", "client": "server", "accuracy": "", "loss": ""}]).drawn
