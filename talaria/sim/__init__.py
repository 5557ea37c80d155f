"""The simulated world: SimPy processes that execute the policies on instances with a mechanistic memory."""
