# Every task of the series by name; `make` alone lists them.
#
#   PYTHON=python3.12        the interpreter that .venv is made with
#   VENV=path                your own environment instead of .venv: used as it is, nothing is installed
#   WORKERS=2                how many tests or notebooks run at once
#   CHAPTERS=scripts/ch01_attention.py    the chapters for `make notebooks` and `make workbook`
#   FOLDER=build/workbook                 what `make lab` opens, if not the notebooks; where `make living` writes its page
#   PRESET=sample CORPUS=sample           what `make train` trains; on what, if not the preset's own
#   ARGS="--device cuda"     further options of `make train` and the tasks that make records

PYTHON ?= python3
WORKERS ?= 2
CHAPTERS ?= $(sort $(wildcard scripts/ch[0-9][0-9]_*.py) \
  $(patsubst notebooks/%.ipynb,scripts/%.py,$(wildcard notebooks/ch[0-9][0-9]_*.ipynb)))
PRESET ?= small
NAME ?= table3

# Threads that spin while they wait starve a shared machine: minutes instead of seconds. Threads
# that sleep at once wake up late: a small step takes twice as long. So: spin briefly, then sleep.
export OMP_WAIT_POLICY = passive
export GOMP_SPINCOUNT ?= 20000

ifdef VENV
ENVIRONMENT := given
CAN_RUN := given-run
INSTALL_PEERS = { echo "$(VENV) lacks packages: run $(PY) -m pip install -e '.[bench]'"; exit 1; }
else
VENV := .venv
ENVIRONMENT := .venv/ready
CAN_RUN := .venv/run-ready
INSTALL_PEERS = $(PY) -m pip install --disable-pip-version-check -e '.[bench]'
endif
PY := $(VENV)/bin/python
# One thread for each of several processes; what is stored and compared comes from a CPU.
ONE_THREAD := OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=
SAY = @echo "── $(1)"

.DEFAULT_GOAL := help
.PHONY: help setup given given-run run browser check lint test audit notebooks workbook book living colab address lab train ablate study records best gpu bench bench-decode translate clean

help:  ## list the tasks
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(ENVIRONMENT)  ## make .venv and install the tested versions; again when requirements.txt changes

# What running needs comes first and alone: a fraction of what tests and notebooks need.
.venv/run-ready: requirements-run.txt
	$(call SAY,making .venv with $(PYTHON) and installing requirements-run.txt (minutes the first time))
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) isn't Python 3.11 or newer: name one, make PYTHON=python3.12"; exit 1; }
	rm -rf .venv
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --disable-pip-version-check -r requirements-run.txt
	@touch $@

.venv/ready: requirements.txt .venv/run-ready
	$(call SAY,installing requirements.txt (minutes the first time))
	.venv/bin/python -m pip install --disable-pip-version-check -r requirements.txt
	@touch $@

given-run:
	@$(call HAS,requirements-run.txt)

given: given-run
	@$(call HAS,requirements.txt,version("from-attention-to-translation"))

HAS = $(PY) -c 'import re; from importlib.metadata import version; \
  [version(name) for name in re.findall(r"^\w[\w-]*", open("$(1)").read(), re.M)]; $(2)' 2>/dev/null || \
  { echo "$(VENV) lacks packages: run $(PY) -m pip install -r $(1)"; exit 1; }

run: $(CAN_RUN)  ## train a small translator on the sample corpus (CPU, 2 to 4 minutes) and show it at work
	$(call SAY,training on the sample corpus; BLEU and translations follow)
	$(PY) -m scripts.train --preset sample --device cpu

browser:
	@.ci/tools
	@test docs/node_modules/.package-lock.json -nt docs/package-lock.json || \
	  npm ci --prefix docs --ignore-scripts --no-audit --no-fund --loglevel=error

# Three gates: while editing, before a change is offered, and in CI.
PYTEST = $(ONE_THREAD) $(PY) -m pytest -n $(WORKERS) --dist worksteal
check: setup lint  ## the first gate: lint, layers, pairs in step, the quick tests (3 minutes)
	$(call SAY,pytest: what is quick)
	$(PYTEST) tests -m "not slow and not audit"

lint: setup
	$(call SAY,ruff: lint and format; import-linter: imports point down)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(VENV)/bin/lint-imports

test: setup browser lint  ## the second: all that `make check` does, all other tests, every notebook against its stored outputs
	$(call SAY,pytest: chapters and house; notebooks and scripts agree)
	$(PYTEST) tests -m "not audit" --durations 10
	$(call SAY,nbval: every notebook again from top to bottom; each output must be as stored)
	$(ONE_THREAD) $(PY) -m pytest notebooks --nbval --nbval-current-env \
	  --nbval-sanitize-with tests/nbval_sanitize.cfg -n $(WORKERS) --dist loadscope --durations 5

audit: setup browser  ## the third, which CI runs after `make test`: what takes long, every cell of every notebook twice
	$(PYTEST) tests -m audit --durations 10

notebooks: setup  ## bring pairs into step, execute the notebooks and store their outputs
	$(PY) -m scripts.book.pairs $(CHAPTERS)
	$(call SAY,executing $(words $(CHAPTERS)) notebooks)
	printf '%s\n' $(CHAPTERS:scripts/%.py=notebooks/%.ipynb) | $(ONE_THREAD) xargs -n 1 -P $(WORKERS) \
	  $(PY) -m scripts.book.execute

workbook: setup  ## write the chapters with their central definitions left for you: build/workbook (keeps what you began)
	@$(PY) -m scripts.book.workbook $(CHAPTERS)

book: setup  ## build the site, docs/_build/html, from the stored notebooks (a minute or two)
	$(PY) docs/build.py

living: setup  ## build the page that translates in a browser: make living [MODEL=runs/NAME [FOLDER=page]] (needs npm once)
	@folder="$${MODEL:+$$MODEL/page}"; $(PY) docs/living/build.py $(if $(MODEL),--model="$$MODEL") \
	  "$${FOLDER:-$${folder:-docs/_build/html/living}}"

SERIES = from-attention-to-translation
colab:  ## write the series as last committed into build/from-attention-to-translation.zip, to lie beside a chapter in Colab
	@mkdir -p build
	git archive --format=zip --output=build/$(SERIES).zip HEAD \
	  pyproject.toml README.md LICENSE scripts notebooks results models

override URL := $(value URL)
export URL
address: setup  ## set the series' public address: make address URL=https://… (an empty one takes it away)
	$(PY) -m scripts.book.address "$$URL"

lab: setup  ## open the notebooks in JupyterLab (the workbook: FOLDER=build/workbook)
	$(PY) -m jupyter lab "$${FOLDER:-notebooks}"

train: $(CAN_RUN)  ## train a model: make train [PRESET=small] [CORPUS=multi30k] [ARGS="--device cuda"] (hours on a CPU)
	$(PY) -m scripts.train --preset $(PRESET) $(if $(CORPUS),--corpus $(CORPUS)) $(ARGS)

ablate: setup  ## train with one ingredient changed at a time and compare: make ablate [ARGS="--help"] (hours)
	$(PY) -m scripts.studies.ingredients $(ARGS)

study: setup  ## train what is missing of table3, block, classify, gpt, grid, recipes or stacks: make study NAME=table3 (hours; resumes)
	$(PY) -m scripts.studies.$(NAME) --save $(ARGS)

records: setup  ## make again the records about chapter 9's model (an hour; needs Multi30k)
	$(PY) -m scripts.studies.judging --save $(ARGS)
	$(PY) -m scripts.studies.searches --save $(ARGS)
	$(PY) -m scripts.studies.choices --save $(ARGS)
	$(PY) -m scripts.studies.heads --save $(ARGS)
	$(PY) -m scripts.studies.aligners --save $(ARGS)

best: setup  ## train the model that ships, from that of chapter 9: make best (10 hours of one thread; resumes)
	$(PY) -m scripts.studies.best --save $(ARGS)

gpu: setup  ## do what is owed on a GPU, in order of worth: make gpu [ARGS="--list"] (half an hour in all; goes on)
	$(PY) -m scripts.gpu $(ARGS)

bench: setup  ## time a training step against nn.Transformer, MarianMTModel and x-transformers, in 16 bits where the processor has them (10 minutes)
	@$(PY) -c 'import transformers, x_transformers' 2>/dev/null || $(INSTALL_PEERS)
	$(PY) -m scripts.studies.race_training peers $(ARGS)

bench-decode: setup  ## time translating a test set against CTranslate2, in 8 bits where the processor has them (a quarter of an hour)
	@$(PY) -c 'import transformers, ctranslate2' 2>/dev/null || $(INSTALL_PEERS)
	$(PY) -m scripts.studies.race_decoding $(ARGS)

# Texts and names travel in the environment, so that no shell ever reads them as a command.
override TEXT := $(value TEXT)
override FILE := $(value FILE)
override MODEL := $(value MODEL)
override FOLDER := $(value FOLDER)
export TEXT FILE MODEL FOLDER
TRANSLATE = $(PY) -m scripts.translate $(if $(MODEL),--model="$$MODEL")
translate: $(CAN_RUN)  ## translate German: make translate TEXT="Ein Hund läuft." or FILE=path [MODEL=runs/NAME]
	@test -n "$$TEXT$$FILE" || \
	  { echo 'Say what to translate: make translate TEXT="Ein Hund läuft.", or FILE=path'; exit 2; }
	@if [ -n "$$TEXT" ]; then printf '%s\n' "$$TEXT" | $(TRANSLATE); \
	  else $(TRANSLATE) --input="$$FILE"; fi

clean:  ## remove .venv and caches; runs/ and your build/workbook/ stay
	rm -rf .venv .pytest_cache .ruff_cache dist docs/_build *.egg-info
	find build -mindepth 1 -maxdepth 1 ! -name workbook -exec rm -rf {} + 2>/dev/null || true
	find . -name __pycache__ -prune -exec rm -rf {} +
