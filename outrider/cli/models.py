"""placeholder"""
import typer
app = typer.Typer()
@app.command("x")
def x(): pass
