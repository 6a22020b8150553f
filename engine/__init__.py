"""engine decides: which sequences run, which token comes next.  Speaks no HTTP; imports nothing.

    scheduler.plan -> runner.forward -> supply masks -> settle (sample, accept) -> scheduler.commit

Try it:  slipstream bench decode smollm2
"""
