"""The measuring kernel: what `bench`, `doctor` and `selftest` have in common.

    subject ──> contenders ──> Contest ──> Figures ──> Record ──> table, JSON, plot

A *subject* is what is measured: `LoadedModels` on their threads. *Contenders* are the
ways to decode it. A `Contest` has them take turns on the same cases, repeatedly, after a warm-up; it can be stopped at
any time and knows what is complete so far. `Figure`s are declared once, and computed from the runs for JSON and for the
table alike. A `Record` holds the figures; `reports` prints and writes it.

- `loaded_models`: a target and its drafters, and runtimes over them
- `contest`: turns, warm-up, repeats, failures
- `figures`: ratios, spreads, figures, records
- `pass_times`: forward passes of one model, by width
- `timing`: tokens and their times, timing windows, busy seconds
- `reports`, `plots`: tables and bars, for the commands
"""
