"""Other systems as policies: each system's own placement and return rule on the same instances, books and health rules as ours.

What a rule here leaves out of its source is said in its docstring. Overload is everybody's own policy in common
(``knobs.overload``): where a source rejects calls, a session that loses one would end, and nothing could be compared.
"""
