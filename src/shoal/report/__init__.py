"""What people look at: the page of a run, the comparison of several, event files for TensorBoard.

Everything is made from a run's folder alone, so that any page can be made again at any time.
"""
