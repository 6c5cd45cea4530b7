"""One page, a markdown text and a table about lag sweeps: ``python -m benchmarks.report DIR [DIR ...] out=FILE.html``.

``studies`` reads folders, ``estimates`` holds the statistics, ``protocol`` the families of tests and the rule that
turns them into a verdict, ``answer`` the words for it, ``tables`` and ``figures`` what is shown; ``agreement`` and
``agreement_view`` compare the laboratory with the real stack; ``page`` makes the files.
"""
