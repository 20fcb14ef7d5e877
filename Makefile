# make demo    SmolLM2-135M beyond its trained length, unpatched and patched: loss by position, an answer, a plot
# make test    the whole test-suite
# make check   lint, format and types
# make bench   time and memory of patched models against stock, in one run
# make smoke   real weights: the tests marked slow
# make wheels  a wheel, installed alone with the oldest and the newest supported transformers, passes the core tests

PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/python
OLDEST = 5.15.0
NEWEST = 5.24.0
CORE_TESTS = tests/test_reference.py tests/test_frequency.py tests/test_dynamic.py tests/test_contracts.py tests/test_position_maps.py \
	tests/test_biases.py tests/test_layers.py tests/test_rotations.py tests/test_absolute.py tests/test_bloom.py tests/test_t5.py

.PHONY: demo test check bench smoke wheels
.DELETE_ON_ERROR:

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@

demo: $(VENV)/installed
	$(RUN) -m eval demo

test: $(VENV)/installed
	$(RUN) -m pytest -n auto -m "not slow"

smoke: $(VENV)/installed
	$(RUN) -m pytest -m slow

check: $(VENV)/installed
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

bench: $(VENV)/installed
	$(RUN) -m eval speed

wheels: $(VENV)/installed
	rm -rf build/wheels && $(RUN) -m build --quiet --wheel --outdir build/wheels .
	for version in $(OLDEST) $(NEWEST); do \
		rm -rf build/venv && $(PYTHON) -m venv build/venv && \
		sed '/^transformers==/d; /^huggingface_hub==/d; /^tokenizers==/d; /^peft==/d' constraints.txt > build/constraints.txt && \
		build/venv/bin/pip install --quiet -c build/constraints.txt "$$(ls build/wheels/*.whl)" transformers==$$version \
			peft pytest pytest-xdist hypothesis && \
		(cd build && venv/bin/python -c "import hf_posenc, transformers; print(hf_posenc.__file__, transformers.__version__)") && \
		build/venv/bin/python -P -m pytest -n auto $(CORE_TESTS) || exit 1; \
	done
