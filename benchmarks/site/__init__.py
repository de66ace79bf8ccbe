"""The pages that `asv publish` writes of what was measured: read (`data`), seen (`views`), written.

They are whole without JavaScript, and ask nothing of another machine.
"""
