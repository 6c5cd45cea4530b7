"""One page, a markdown text and a table about lag sweeps: ``python -m benchmarks.report DIR [DIR ...] out=FILE.html``.

``studies`` reads folders, ``estimates`` holds the statistics, ``protocol`` the families of tests and the rule that
turns them into a verdict, ``agreement`` the comparison of the two engines, ``answer`` the words for it, ``tables`` and ``figures`` what is shown, ``page`` the files.
"""
