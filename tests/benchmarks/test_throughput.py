"""benchmarks/throughput.py: where the wall time goes, from published numbers; what the documentation shows of it."""

import json

import pytest
from benchmark_helpers import ROOT, run_benchmark

NUMBERS = ROOT / "benchmarks" / "results" / "throughput.json"


def rows_of(text, first):
    """The rows of the Markdown table whose head begins with some text, as lists of cells."""
    lines = iter(text.splitlines())
    head = next(line for line in lines if line.startswith(first))
    rows = [head]
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append(line)
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in [rows[0], *rows[2:]]]


@pytest.fixture(scope="module")
def printed():
    done = run_benchmark("throughput", "--table", NUMBERS)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_parts_of_published_numbers_add_up_to_the_wall_time(printed):
    """Milliseconds a chunk times chunks a second are a second; waiting is all of it, whatever it is divided into."""
    head, *rows = rows_of(printed, "| envs | mode | chunks/s")
    found = json.loads(NUMBERS.read_text())["results"]
    assert [row[:2] for row in rows] == [
        [n, mode] for n in ("1", "2", "4", "8", "16") for mode in ("serial", "overlap")
    ]
    for row in rows:
        cells, numbers = dict(zip(head, row, strict=True)), found[row[0]][row[1]]
        a_chunk = 1000 * numbers["wall"] / numbers["chunks"]
        for part in ("learner", "VLA", "encoder", "transport"):
            assert float(cells[part]) == pytest.approx(1000 * numbers[part] / numbers["chunks"], abs=0.051)
        waiting = [float(cells[name]) for name in head if name.startswith("waiting")]
        assert sum(waiting) == pytest.approx(1000 * numbers["waiting"] / numbers["chunks"], abs=0.16)
        parts = sum(map(float, row[5:-1]))
        assert float(cells["sum"].rstrip("%")) / 100 == pytest.approx(parts / a_chunk, abs=0.36 / a_chunk + 0.0005)
        assert parts == pytest.approx(a_chunk, rel=0.05)


def test_the_page_on_speed_has_the_printed_parts(printed):
    _, *rows = rows_of(printed, "| envs | mode | chunks/s")
    _, *shown = rows_of((ROOT / "docs" / "misc" / "speed.md").read_text(), "| environments | loop | wall time")
    assert len(shown) == len(rows) == 10
    for row, on_page in zip(rows, shown, strict=True):
        assert on_page[:2] == row[:2] and on_page[3:] == [*row[5:-1], row[-1].replace("%", " %")]
        assert float(on_page[2]) == pytest.approx(1000 / float(row[2]), abs=0.3)


def test_files_of_something_else_are_refused(tmp_path):
    (tmp_path / "other.json").write_text("[]")
    for name in ("other.json", "none.json"):
        done = run_benchmark("throughput", "--table", tmp_path / name)
        assert done.returncode == 2 and "--table must name a file that --json of this command" in done.stderr


def test_parts_that_do_not_add_up_end_the_command(tmp_path):
    numbers = json.loads(NUMBERS.read_text())
    numbers["results"]["4"]["overlap"]["wall"] *= 1.1
    (tmp_path / "off.json").write_text(json.dumps(numbers))
    done = run_benchmark("throughput", "--table", tmp_path / "off.json")
    assert done.returncode == 1 and "do not add up to the wall time within 5 %: 4 overlap." in done.stderr
