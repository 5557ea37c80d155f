"""Calibration of the simulator on the published numbers: one set of physically bounded unknowns for each testbed.

``python -m studies.calibrate fit tp8`` searches (Optuna), polishes (scipy), measures sensitivities and leaves
``results/tp8.json``; ``apply`` writes the values into the shipped profile and scenarios. A testbed is one file
(``tp8.py``): its parameters with their bounds, and which published numbers it is fitted on. All else is common.
"""
