# Everything is set up on first use: `make demo` and `make test` need only Python >= 3.11.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
# Without a cache of compiled programs: docs/faq.md says what one does to collectives on CPU devices. The
# tests of a file share what is compiled for them, so one worker runs them all.
TESTS := $(RUN) -m pytest -n 2 --dist loadfile
# Freed memory (of glibc) stays for the next program, whose operations name one line of Python each.
# Threads of NumPy's BLAS spin for a quarter of a second when a process starts.
LEAN := MALLOC_TRIM_THRESHOLD_=1000000000 MALLOC_TOP_PAD_=67108864 JAX_TRACEBACK_IN_LOCATIONS_LIMIT=1 \
  OPENBLAS_NUM_THREADS=1
# The programs of XLA are the same with plainer machine code, and compile three times as fast.
PLAIN := --xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1 \
  --xla_llvm_disable_expensive_passes=true
QUICK_CODE := $(LEAN) XLA_FLAGS="$(XLA_FLAGS) $(PLAIN) --xla_cpu_use_fusion_emitters=false"
# The newest XLA knows no more of the last, and ends a process that asks for it.
QUICK_NEWEST := $(LEAN) XLA_FLAGS="$(XLA_FLAGS) $(PLAIN)"
# Of compilers that look for their devices.
QUIET := TF_CPP_MIN_LOG_LEVEL=3
# The newest JAX wants a newer Python than the oldest that boostax runs on.
NEWEST_PYTHON ?= $(firstword $(foreach python,python3.13 python3.12, \
 $(shell $(python) -c "import sys; print(sys.executable)" 2>/dev/null)) \
 $(shell pyenv prefix 3.13.0 2>/dev/null | sed 's,$$,/bin/python3,'))
PEER := $(if $(wildcard .peers/mindspore/bin/python), or mindspore)
OLDEST_PYTHON ?= $(firstword $(shell python3.11 -c "import sys; print(sys.executable)" 2>/dev/null) \
 $(PYTHON))

.PHONY: demo test test-fast test-compilers test-long test-newest test-oldest test-foreign test-mindspore bench bench-compilers bench-short docs release lint clean newest-python

demo: $(READY)
	$(RUN) examples/train_text.py --output runs/demo

test: $(READY) lint
	$(QUICK_CODE) $(TESTS)

# One case of each law in tests/fast.txt, in two minutes of a processor.
test-fast: $(READY)
	$(QUICK_CODE) $(RUN) -m pytest --fast $(OPTIONS)

# The same tests on what pip takes today, and on the oldest versions that pyproject.toml allows.
test-newest: newest-python
	test -x .venv-newest/bin/python || $(NEWEST_PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet --upgrade pip
	.venv-newest/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager \
	  --editable '.[dev]'
	.venv-newest/bin/python -m pip list | grep -E '^(jax|jaxlib|flax|optax) '
	$(QUICK_NEWEST) .venv-newest/bin/python -m pytest -n 2 --dist loadfile

newest-python:
	@test -n "$(NEWEST_PYTHON)" || { echo "make: NEWEST_PYTHON must be Python 3.12 or later, got" \
	  "none. Say where it is: make test-newest NEWEST_PYTHON=..."; exit 1; }

# Laws of the compiled programs of CPU, TPU v5e and H100; no TPU or GPU is needed.
test-compilers: .venv-aot/.ready
	$(QUIET) .venv-aot/bin/python -m pytest -n 2 --dist loadgroup -m compilers \
	  tests/test_compilers.py tests/test_compiled_placements.py

# The suites of Optax and of Flax NNX, with boostax put in.
test-foreign: $(READY)
	$(QUICK_CODE) $(RUN) tests/foreign/run.py --write

# Programs drawn at random, in MindSpore 2.10 and in boostax; `make test-long` runs them where it is.
test-mindspore: $(READY) .peers/mindspore/.ready
	$(QUICK_CODE) $(RUN) -m pytest -m mindspore tests/test_mindspore_programs.py

test-oldest: .venv-oldest/.ready
	$(QUICK_CODE) .venv-oldest/bin/python -m pytest -n 2 --dist loadfile

test-long: $(READY)
	$(TESTS) -m "(long or hypothesis$(PEER)) and not gpu" --hypothesis-profile=search

bench: $(READY)
	$(RUN) benchmarks/loss_scale.py
	$(RUN) benchmarks/accumulation.py
	$(RUN) benchmarks/precision.py
	$(RUN) benchmarks/adasum.py
	$(RUN) benchmarks/adasum_convergence.py
	-$(RUN) benchmarks/network.py
	$(RUN) benchmarks/compression_accuracy.py
	$(RUN) benchmarks/stored_accuracy.py
	$(RUN) benchmarks/stored_time.py
	$(RUN) benchmarks/restrictions.py
	$(RUN) benchmarks/check_replicas.py
	$(RUN) benchmarks/average_params.py
	$(RUN) benchmarks/freezing.py
	$(RUN) benchmarks/freezing_accuracy.py
	$(RUN) benchmarks/subspace.py
	$(RUN) benchmarks/less_bn.py
	$(RUN) benchmarks/group_scale.py
	$(QUICK_CODE) $(RUN) benchmarks/fuzz.py
	-$(RUN) benchmarks/network_losses.py
	-$(RUN) benchmarks/gpu.py
	$(RUN) benchmarks/peers_jax.py
	$(RUN) benchmarks/tables.py --write

# docs/compilers.md from compiled programs; an hour.
bench-compilers: .venv-aot/.ready
	$(QUIET) .venv-aot/bin/python benchmarks/compilers.py

# Every technique beside what one would use instead, in a few rounds; prints a table, records nothing.
bench-short: $(READY)
	$(RUN) benchmarks/peers_jax.py --short

# Wheel and sdist; the command audits with the wheel, jax, optax and numpy alone; the tests of the
# sdist pass beside the wheel, without a checkout, on the pinned JAX and on the newest.
release: $(READY) newest-python
	rm -rf dist build/release && mkdir -p build/release
	PIP_CONSTRAINT=constraints.txt $(RUN) -m build --outdir dist
	tar -xzf dist/boostax-*.tar.gz -C build/release --strip-components 1
	rm -r build/release/boostax
	$(call wheel,$(PYTHON),alone,--constraint constraints.txt,)
	cd build/release/docs/examples && ../../alone/bin/boostax audit audited:program --cpu-devices 8 \
	  --max-reductions 1.01
	$(call wheel,$(PYTHON),pinned,--constraint constraints.txt,[dev])
	cd build/release && $(QUICK_CODE) pinned/bin/python -m pytest -n 2 --dist loadfile
	$(call wheel,$(NEWEST_PYTHON),newest,,[dev])
	cd build/release && $(QUICK_NEWEST) newest/bin/python -m pytest -n 2 --dist loadfile

# An environment with the wheel: of a Python, by a name, with options of pip and extras.
define wheel
$(1) -m venv build/release/$(2)
build/release/$(2)/bin/python -m pip install --quiet $(3) "$$(ls dist/*.whl)$(4)"
endef

docs: $(READY)
	$(RUN) -m sphinx -q -W --keep-going -c docs -b html -d build/doctrees . build/site
	$(RUN) docs/search.py build/site
	@echo "the site: build/site/index.html"

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright

$(READY): pyproject.toml constraints.txt
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --upgrade pip
	$(RUN) -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

.venv-aot/.ready: pyproject.toml constraints.txt
	test -x .venv-aot/bin/python || $(PYTHON) -m venv .venv-aot
	.venv-aot/bin/python -m pip install --quiet --upgrade pip
	.venv-aot/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[aot]' \
	  flax hypothesis pytest pytest-xdist
	touch $@

# 2.8 GB; MindSpore was built against the older NumPy.
.peers/mindspore/.ready:
	test -x .peers/mindspore/bin/python || $(PYTHON) -m venv .peers/mindspore
	.peers/mindspore/bin/python -m pip install --quiet mindspore==2.10.0 numpy==1.26.4
	touch $@

.venv-oldest/.ready: pyproject.toml constraints-oldest.txt
	test -x .venv-oldest/bin/python || $(OLDEST_PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --upgrade pip
	.venv-oldest/bin/python -m pip install --quiet --constraint constraints-oldest.txt \
	  --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .venv-aot .venv-newest .venv-oldest .pytest_cache .ruff_cache runs
