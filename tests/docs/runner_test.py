"""The runner of the pages finds wrong outputs, errors and unchecked blocks."""

import os
import re
import sys
import warnings

import jax
import page_blocks
import page_runner
import pytest


def read(tmp_path, text):
  path = tmp_path / "page.md"
  path.write_text(text)
  return page_blocks.read(path)


def run(tmp_path, text, kinds=("python", "bash")):
  folder = tmp_path / "folder"
  folder.mkdir()
  return page_runner.run(read(tmp_path, text), folder, kinds)


@pytest.mark.parametrize(
  ("code", "text"),
  [
    ("print('a b')\nprint('c')", "a b\nc"),
    ("print('a b')\nprint('c')", "a ... c"),
    ("print('a b')\nprint('c')", "a\n..."),
    ("int('a')", "ValueError: invalid literal for int() ...: 'a'"),
    ("print(1)\nint('a')", "1\nValueError: invalid literal ..."),
    ("raise ValueError('one\\ntwo')", "ValueError: one\ntwo"),
    ("raise ValueError('one\\ntwo')", "two"),
    (
      "import configparser\nraise configparser.NoSectionError('x')",
      "NoSectionError: No section: 'x'",
    ),
    ("import warnings\nwarnings.warn('a b')", "UserWarning: a\nb"),
    ("raise SystemExit('end')", "SystemExit: end"),
  ],
)
def test_text_after_python_is_what_it_gives(tmp_path, code, text):
  page = (
    f"# A\n\n```python\n{code}\n```\n\nThis prints\n\n```text\n{text}\n```\n"
  )
  page_runner.check_kinds(read(tmp_path, page))
  run(tmp_path, page)


@pytest.mark.parametrize(
  ("code", "text"),
  [
    ("print('a')", "b"),
    ("print('a')", "a b"),
    ("a = 1", "a"),
    ("print('a')", "ValueError: a"),
    ("raise ValueError('a')", "ValueError: b"),
    ("raise ValueError('a')", "TypeError: a"),
    ("import warnings\nwarnings.warn('a')", "UserWarning: b"),
  ],
)
def test_other_text_is_named_with_page_and_line(tmp_path, code, text):
  page = f"\n```python\n{code}\n```\n```text\n{text}\n```\n"
  line = page[: page.index("```text")].count("\n") + 2
  with pytest.raises(page_runner.PageError, match=rf"^page\.md:{line}: "):
    run(tmp_path, page)


def test_an_error_is_named_with_the_line_of_the_page(tmp_path):
  page = "# A\n\n- b\n\n  ```python\n  def f():\n    1 / 0\n  f()\n  ```\n"
  with pytest.raises(page_runner.PageError) as raised:
    run(tmp_path, page)
  assert str(raised.value) == "page.md:7: ZeroDivisionError: division by zero"
  page = "```python\nf(\n```\n"
  with pytest.raises(page_runner.PageError, match=r"page\.md:2: SyntaxError"):
    page_runner.run(read(tmp_path, page), tmp_path, ("python",))


def test_blocks_share_names_and_run_in_order(tmp_path):
  page = "```python\na = [1]\n```\n```python\na.append(2)\n```\n"
  assert run(tmp_path, page)["a"] == [1, 2]


@pytest.mark.parametrize(
  ("page", "message"),
  [
    ("```\na\n```\n", r"page\.md:2: no test checks blocks of the kind ''"),
    ("```yaml\na\n```\n", "kind 'yaml'"),
    ("```{code-block} python\na\n```\n", "kind '{code-block}'"),
    ("````{note}\n\n```json\n{}\n```\n````\n", r"page\.md:4: .* kind 'json'"),
    ("```text\na\n```\n", "follows no code block"),
    ("```python\n```\n```text\n```\n```text\n```\n", r":6: .* follows no code"),
    ("```bash\nkubectl a\n```\n", "no rule for 'kubectl a'"),
    ("```bash\npip install a\nls\n```\n", "no rule for 'ls'"),
  ],
)
def test_a_block_that_nothing_checks_is_named(tmp_path, page, message):
  with pytest.raises(page_runner.PageError, match=message):
    page_runner.check_kinds(read(tmp_path, page))


@pytest.mark.parametrize(
  ("page", "message"),
  [
    ("<!-- tests: fast -->\n", "no mark of tests: 'fast'"),
    ("# A\n\n```python\na\n", r":3: the block does not end"),
  ],
)
def test_a_malformed_page_is_an_error(tmp_path, page, message):
  with pytest.raises(ValueError, match=message):
    read(tmp_path, page)


def test_a_command_prints_its_mistake(tmp_path):
  text = "flaxshard: --config=digitz: ... Did you mean 'digits' ..."
  command = "flaxshard --config=digitz \\\n  --workdir=/tmp/a  # a typo"
  page = f"```bash\n{command}\n```\n\n```text\n{text}\n```\n"
  run(tmp_path, page)
  with pytest.raises(page_runner.PageError, match="'digits'"):
    page_runner.run(read(tmp_path, page.replace(text, "a")), tmp_path)
  (tmp_path / "configs").unlink()
  (tmp_path / "benchmarks").unlink()
  # Without a text, it has to succeed.
  with pytest.raises(page_runner.PageError, match="Did you mean 'digits'"):
    page = read(tmp_path, page.split("```text")[0])
    page_runner.run(page, tmp_path)


@pytest.mark.slow
def test_commands_train_in_the_folder_and_with_a_config_of_the_page(tmp_path):
  page = """
```python
import flaxshard as fs

def get_config():
  config = fs.config.read("digits")
  config.batch_size = 8
  return config
```
```bash
flaxshard --config=mine.py --workdir=/tmp/mine
flaxshard --config=mine.py --workdir=/tmp/mine \\
  --config.num_train_steps=9 --config.resume=extend
python -m flaxshard.checkpoint /tmp/mine
```
```text
...done: step 2...done: step 4...
```
```python
step = int(fs.load("/tmp/mine").step)
```
"""
  assert run(tmp_path, page)["step"] == 4
  assert (tmp_path / "folder" / "tmp" / "mine" / "metrics.jsonl").exists()


def test_what_a_page_changes_is_restored(tmp_path):
  before = os.getcwd(), dict(os.environ), list(sys.path), list(warnings.filters)
  precision = jax.config.jax_default_matmul_precision
  page = """
```python
import os, pathlib, sys, warnings
import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_default_matmul_precision", "highest")
os.environ["A_VARIABLE"] = "1"
os.environ["PATH"] = ""
sys.path.insert(0, "a")
warnings.simplefilter("error")
pathlib.Path("a_module_of_the_page.py").write_text("x = 1")
import a_module_of_the_page
os.mkdir("a")
os.chdir("a")
is_main = sys.modules["__main__"].__dict__ is globals()
```
"""
  assert run(tmp_path, page)["is_main"]
  after = os.getcwd(), dict(os.environ), list(sys.path), list(warnings.filters)
  assert after == before
  assert jax.config.jax_default_matmul_precision == precision
  assert "a_module_of_the_page" not in sys.modules
  with pytest.raises(page_runner.PageError, match="AssertionError: 4"):
    update = 'import jax\njax.config.update("jax_num_cpu_devices", 4)'
    page = read(tmp_path, f"```python\n{update}\n```\n")
    page_runner.run(page, tmp_path)


def test_pages_are_found_by_themselves(monkeypatch, tmp_path):
  monkeypatch.setattr(page_blocks, "ROOT", tmp_path)
  for name in ("README.md", "docs/a.md", "docs/b/c.md", "docs/_build/d.md"):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("<!-- tests: slow -->\n# A\n")
  pages = page_blocks.pages()
  assert [page.name for page in pages] == [
    "README.md",
    "docs/a.md",
    "docs/b/c.md",
  ]
  assert {page.mark for page in pages} == {"slow"}
  assert re.search("tests: slow", pages[0].path.read_text())
