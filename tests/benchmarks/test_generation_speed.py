"""The benchmark of generation: its plain loops draw from the model, and its tables are complete."""


def test_it_measures_all_peers_and_ways(quick_command, trained):
    """Three peers with a speed, and for each way to choose words a share of tails."""
    done = quick_command(
        "-m", "benchmarks.generation", f"--workdir={trained}", "--words=4", "--repeats=1"
    )
    assert (done.returncode, done.stderr) == (0, "")
    rows = [
        line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")
    ]
    assert len(rows) == 11
    speeds = {name: float(number.replace(",", "")) for name, number in rows[1:4]}
    assert all(speed > 0 for speed in speeds.values()) and "no cache, all probabilities" in speeds
    shares = {name: float(number.removesuffix("%")) for name, number in rows[5:]}
    assert all(0 <= share <= 100 for share in shares.values()) and shares["draws"] < 100
