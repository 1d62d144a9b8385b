"""Where client work happens. Every engine launches the same ServerApp and ClientApp.

`serial` works in this process without Ray, `ray` in actors through Flower's simulation engine.
"""
