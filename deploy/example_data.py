"""Makes data to try deploy/ with: two unequal tables of patients, and public data."""

import argparse
from pathlib import Path

import numpy as np
from sklearn.datasets import load_breast_cancer

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("folder", type=Path, nargs="?", default=Path(), help="where they are written (default: here)")
folder: Path = parser.parse_args().folder
table = load_breast_cancer(as_frame=True).frame.sample(frac=1, random_state=0)
table["malignant"] = 1 - table.pop("target")
public, rest = table[:169], table[169:]
small = rest["mean radius"] < rest["mean radius"].median()  # the hospitals see different patients
for name, part in {"hospital-a": rest[small], "hospital-b": rest[~small]}.items():
    (folder / name).mkdir(parents=True, exist_ok=True)
    part.to_csv(folder / name / "patients.csv", index=False)
    print(f"{folder / name / 'patients.csv'}: {len(part)} samples, {part['malignant'].mean():.0%} malignant")
np.save(folder / "public.npy", public.drop(columns="malignant").to_numpy())
print(f"{folder / 'public.npy'}: {len(public)} samples without labels")
