# Everything is set up on first use: `make demo` and `make test` need only Python >= 3.11.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
# Without a cache of compiled programs: docs/faq.md says what one does to collectives on CPU devices.
TESTS := $(RUN) -m pytest -n 2 --dist loadgroup
# The programs of XLA are the same with plainer machine code, and compile three times as fast.
QUICK_CODE := XLA_FLAGS="$(XLA_FLAGS) --xla_backend_optimization_level=0 \
 --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"

.PHONY: demo test test-long bench bench-short docs release lint clean

demo: $(READY)
	$(VENV)/bin/boostax train text --dtype float16 --loss-scale dynamic --accumulate 4 --devices 4 --output runs/demo --resume

test: $(READY) lint
	$(QUICK_CODE) $(TESTS)

test-long: $(READY)
	$(TESTS) -m "(long or hypothesis) and not gpu" --hypothesis-profile=search

bench: $(READY)
	$(RUN) benchmarks/loss_scale.py
	$(RUN) benchmarks/accumulation.py
	$(RUN) benchmarks/precision.py
	$(RUN) benchmarks/adasum.py
	$(RUN) benchmarks/adasum_convergence.py
	$(RUN) benchmarks/compression_time.py
	$(RUN) benchmarks/compression_accuracy.py
	$(RUN) benchmarks/freezing.py
	$(RUN) benchmarks/freezing_accuracy.py
	$(RUN) benchmarks/subspace.py
	$(RUN) benchmarks/less_bn.py
	$(RUN) benchmarks/group_scale.py
	$(RUN) benchmarks/combinations.py
	$(RUN) benchmarks/scaling.py
	$(RUN) benchmarks/growth.py
	$(RUN) benchmarks/scorecard.py
	$(RUN) benchmarks/soak.py
	$(RUN) benchmarks/newcomer.py
	$(RUN) benchmarks/recipes.py
	$(RUN) benchmarks/peers_jax.py
	-$(RUN) benchmarks/peers/setup.py
	$(RUN) benchmarks/peers_frameworks.py
	$(RUN) benchmarks/plots.py
	$(RUN) tests/figures.py --write

# Every technique beside what one would use instead, in a few rounds; prints a table, records nothing.
bench-short: $(READY)
	$(RUN) benchmarks/peers_jax.py --short

# Wheel and sdist, and the tests of the sdist in an environment that has the wheel and no checkout.
release: $(READY)
	rm -rf dist build/release && mkdir -p build/release
	PIP_CONSTRAINT=constraints.txt $(RUN) -m build --outdir dist
	tar -xzf dist/boostax-*.tar.gz -C build/release --strip-components 1
	rm -r build/release/boostax
	$(PYTHON) -m venv build/release/.venv
	build/release/.venv/bin/python -m pip install --quiet --constraint constraints.txt "$$(ls $(CURDIR)/dist/*.whl)[dev]"
	cd build/release && $(QUICK_CODE) .venv/bin/python -m pytest -n 2 --dist loadgroup

docs: $(READY)
	$(RUN) -m sphinx -q -W --keep-going -c docs -b html -d build/doctrees . build/site
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

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache runs
