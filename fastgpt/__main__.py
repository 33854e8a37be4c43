"""The commands of fastgpt; each shows its flags with --help.

python -m fastgpt.cli [RECIPE]              train a model, as train.py does
python -m fastgpt.prepare SOURCE --out DIR  tokenize a corpus, for many runs
python -m fastgpt.data DIR                  show and check prepared data
python -m fastgpt.doctor [RECIPE]           check this machine, or if a run fits
python -m fastgpt.sample RUN                write text, or chat
python -m fastgpt.serve MODEL               serve a model over HTTP, with a page
python -m fastgpt.evaluate MODEL            score a model on texts or tasks
python -m fastgpt.report RUN                write a page about runs
python -m fastgpt.compare A B               show what differs between two runs
python -m fastgpt.convert SOURCE TARGET     convert from or to other formats
"""

import sys

from fastgpt.terminal import print_text

if __name__ == "__main__":
    print_text(str(__doc__).rstrip())
    sys.exit(2 * bool({*sys.argv[1:]} - {"-h", "--help"}))
