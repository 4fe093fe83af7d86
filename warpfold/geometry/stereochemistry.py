"""Measurements of the twenty amino acids: ideal atom positions, bond lengths, bond angles, atom radii.

This file contains the numbers as short text, and `residue.py` builds arrays from them. Lengths are in angstrom, angles
in degrees.

Sources: ideal positions, as published with AlphaFold2 (Supp. 1.8.4; `residue_constants.py`, Apache-2.0); bond lengths
and angles with standard deviations, Engh & Huber, International Tables for Crystallography F (2001) 18.3, as published
with AlphaFold2 (Supp. 1.9.11; `stereo_chemical_props.txt`); van der Waals radii, Bondi (1964).
"""

# Atoms in AF2's atom14 order: name, rigid group, x, y, z in the frame of that group.  Groups: 0 backbone, 3 psi,
# 4 to 7 chi1 to chi4; 1 (omega) and 2 (phi) have hydrogens only. A group's origin is the end of its rotation axis, x
# runs along the axis, and the atom that defines the torsion lies in the xy plane at positive y.
IDEAL_ATOMS: dict[str, str] = {
    "ALA": """N 0 -0.525 1.363 0.000, CA 0 0.000 0.000 0.000, C 0 1.526 0.000 0.000, O 3 0.627 1.062 0.000,
              CB 0 -0.529 -0.774 -1.205""",
    "ARG": """N 0 -0.524 1.362 0.000, CA 0 0.000 0.000 0.000, C 0 1.525 0.000 0.000, O 3 0.626 1.062 0.000,
              CB 0 -0.524 -0.778 -1.209, CG 4 0.616 1.390 0.000, CD 5 0.564 1.414 0.000, NE 6 0.539 1.357 0.000,
              CZ 7 0.758 1.093 0.000, NH1 7 0.206 2.301 0.000, NH2 7 2.078 0.978 0.000""",
    "ASN": """N 0 -0.536 1.357 0.000, CA 0 0.000 0.000 0.000, C 0 1.526 0.000 0.000, O 3 0.625 1.062 0.000,
              CB 0 -0.531 -0.787 -1.200, CG 4 0.584 1.399 0.000, OD1 5 0.633 1.059 0.000, ND2 5 0.593 -1.188 0.001""",
    "ASP": """N 0 -0.525 1.362 0.000, CA 0 0.000 0.000 0.000, C 0 1.527 0.000 0.000, O 3 0.626 1.062 0.000,
              CB 0 -0.526 -0.778 -1.208, CG 4 0.593 1.398 0.000, OD1 5 0.610 1.091 0.000, OD2 5 0.592 -1.101 -0.003""",
    "CYS": """N 0 -0.522 1.362 0.000, CA 0 0.000 0.000 0.000, C 0 1.524 0.000 0.000, O 3 0.625 1.062 0.000,
              CB 0 -0.519 -0.773 -1.212, SG 4 0.728 1.653 0.000""",
    "GLN": """N 0 -0.526 1.361 0.000, CA 0 0.000 0.000 0.000, C 0 1.526 0.000 0.000, O 3 0.626 1.062 0.000,
              CB 0 -0.525 -0.779 -1.207, CG 4 0.615 1.393 0.000, CD 5 0.587 1.399 0.000, OE1 6 0.634 1.060 0.000,
              NE2 6 0.593 -1.189 -0.001""",
    "GLU": """N 0 -0.528 1.361 0.000, CA 0 0.000 0.000 0.000, C 0 1.526 0.000 0.000, O 3 0.626 1.062 0.000,
              CB 0 -0.526 -0.781 -1.207, CG 4 0.615 1.392 0.000, CD 5 0.600 1.397 0.000, OE1 6 0.607 1.095 0.000,
              OE2 6 0.589 -1.104 -0.001""",
    "GLY": "N 0 -0.572 1.337 0.000, CA 0 0.000 0.000 0.000, C 0 1.517 0.000 0.000, O 3 0.626 1.062 0.000",
    "HIS": """N 0 -0.527 1.360 0.000, CA 0 0.000 0.000 0.000, C 0 1.525 0.000 0.000, O 3 0.625 1.063 0.000,
              CB 0 -0.525 -0.778 -1.208, CG 4 0.600 1.370 0.000, ND1 5 0.744 1.160 0.000, CD2 5 0.889 -1.021 0.003,
              CE1 5 2.030 0.851 0.002, NE2 5 2.145 -0.466 0.004""",
    "ILE": """N 0 -0.493 1.373 0.000, CA 0 0.000 0.000 0.000, C 0 1.527 0.000 0.000, O 3 0.627 1.062 0.000,
              CB 0 -0.536 -0.793 -1.213, CG1 4 0.534 1.437 0.000, CG2 4 0.540 -0.785 -1.199, CD1 5 0.619 1.391 0.000""",
    "LEU": """N 0 -0.520 1.363 0.000, CA 0 0.000 0.000 0.000, C 0 1.525 0.000 0.000, O 3 0.625 1.063 0.000,
              CB 0 -0.522 -0.773 -1.214, CG 4 0.678 1.371 0.000, CD1 5 0.530 1.430 0.000, CD2 5 0.535 -0.774 1.200""",
    "LYS": """N 0 -0.526 1.362 0.000, CA 0 0.000 0.000 0.000, C 0 1.526 0.000 0.000, O 3 0.626 1.062 0.000,
              CB 0 -0.524 -0.778 -1.208, CG 4 0.619 1.390 0.000, CD 5 0.559 1.417 0.000, CE 6 0.560 1.416 0.000,
              NZ 7 0.554 1.387 0.000""",
    "MET": """N 0 -0.521 1.364 0.000, CA 0 0.000 0.000 0.000, C 0 1.525 0.000 0.000, O 3 0.625 1.062 0.000,
              CB 0 -0.523 -0.776 -1.210, CG 4 0.613 1.391 0.000, SD 5 0.703 1.695 0.000, CE 6 0.320 1.786 0.000""",
    "PHE": """N 0 -0.518 1.363 0.000, CA 0 0.000 0.000 0.000, C 0 1.524 0.000 0.000, O 3 0.626 1.062 0.000,
              CB 0 -0.525 -0.776 -1.212, CG 4 0.607 1.377 0.000, CD1 5 0.709 1.195 0.000, CD2 5 0.706 -1.196 0.000,
              CE1 5 2.102 1.198 0.000, CE2 5 2.098 -1.201 0.000, CZ 5 2.794 -0.003 -0.001""",
    "PRO": """N 0 -0.566 1.351 0.000, CA 0 0.000 0.000 0.000, C 0 1.527 0.000 0.000, O 3 0.621 1.066 0.000,
              CB 0 -0.546 -0.611 -1.293, CG 4 0.382 1.445 0.000, CD 5 0.477 1.424 0.000""",
    "SER": """N 0 -0.529 1.360 0.000, CA 0 0.000 0.000 0.000, C 0 1.525 0.000 0.000, O 3 0.626 1.062 0.000,
              CB 0 -0.518 -0.777 -1.211, OG 4 0.503 1.325 0.000""",
    "THR": """N 0 -0.517 1.364 0.000, CA 0 0.000 0.000 0.000, C 0 1.526 0.000 0.000, O 3 0.626 1.062 0.000,
              CB 0 -0.516 -0.793 -1.215, OG1 4 0.472 1.353 0.000, CG2 4 0.550 -0.718 -1.228""",
    "TRP": """N 0 -0.521 1.363 0.000, CA 0 0.000 0.000 0.000, C 0 1.525 0.000 0.000, O 3 0.627 1.062 0.000,
              CB 0 -0.523 -0.776 -1.212, CG 4 0.609 1.370 0.000, CD1 5 0.824 1.091 0.000, CD2 5 0.854 -1.148 -0.005,
              NE1 5 2.140 0.690 -0.004, CE2 5 2.186 -0.678 -0.007, CE3 5 0.622 -2.530 -0.007,
              CZ2 5 3.283 -1.543 -0.011, CZ3 5 1.715 -3.389 -0.011, CH2 5 3.028 -2.890 -0.013""",
    "TYR": """N 0 -0.522 1.362 0.000, CA 0 0.000 0.000 0.000, C 0 1.524 0.000 0.000, O 3 0.627 1.062 0.000,
              CB 0 -0.522 -0.776 -1.213, CG 4 0.607 1.382 0.000, CD1 5 0.716 1.195 0.000, CD2 5 0.713 -1.194 -0.001,
              CE1 5 2.107 1.200 -0.002, CE2 5 2.104 -1.201 -0.003, CZ 5 2.791 -0.001 -0.003,
              OH 5 4.168 -0.002 -0.005""",
    "VAL": """N 0 -0.494 1.373 0.000, CA 0 0.000 0.000 0.000, C 0 1.527 0.000 0.000, O 3 0.627 1.062 0.000,
              CB 0 -0.533 -0.795 -1.213, CG1 4 0.540 1.429 0.000, CG2 4 0.533 -0.776 1.203""",
}

# The chain of atoms that defines the chi angles, from N, CA and CB on. chi_k is the torsion about the bond between
# atoms k + 1 and k + 2.
CHI_PATH: dict[str, str] = {"ALA": "", "GLY": ""} | {
    name: f"N CA CB {side_chain}"
    for name, side_chain in {
        "ARG": "CG CD NE CZ", "ASN": "CG OD1", "ASP": "CG OD1", "CYS": "SG", "GLN": "CG CD OE1", "GLU": "CG CD OE1",
        "HIS": "CG ND1", "ILE": "CG1 CD1", "LEU": "CG CD1", "LYS": "CG CD CE NZ", "MET": "CG SD CE", "PHE": "CG CD1",
        "PRO": "CG CD", "SER": "OG", "THR": "OG1", "TRP": "CG CD1", "TYR": "CG CD1", "VAL": "CG1",
    }.items()
}  # fmt: skip

# Atoms with interchangeable names, because the last chi angle is symmetric under a half turn (Supp. 1.8.5).
NAMING_SWAPS: dict[str, tuple[tuple[str, str], ...]] = {
    "ASP": (("OD1", "OD2"),),
    "GLU": (("OE1", "OE2"),),
    "PHE": (("CD1", "CD2"), ("CE1", "CE2")),
    "TYR": (("CD1", "CD2"), ("CE1", "CE2")),
}

VDW_RADIUS: dict[str, float] = {"C": 1.7, "N": 1.55, "O": 1.52, "S": 1.8}

# Bonds and angles of the backbone, and the two residues that deviate.
_BACKBONE_BONDS = "N-CA 1.459 0.020, CA-C 1.525 0.026, C-O 1.229 0.019"
_BACKBONE_ANGLES = "N-CA-C 111.0 2.7, CA-C-O 120.1 2.1"

# Bond, length, standard deviation.
BONDS: dict[str, str] = {
    "GLY": "N-CA 1.456 0.015, CA-C 1.514 0.016, C-O 1.232 0.016",
    "PRO": """N-CA 1.468 0.017, CA-C 1.524 0.020, C-O 1.228 0.020, CA-CB 1.531 0.020, CB-CG 1.495 0.050,
              CG-CD 1.502 0.033, CD-N 1.474 0.014""",
} | {
    name: f"{_BACKBONE_BONDS}, {side_chain}"
    for name, side_chain in {
        "ALA": "CA-CB 1.520 0.021",
        "ARG": """CA-CB 1.535 0.022, CB-CG 1.521 0.027, CG-CD 1.515 0.025, CD-NE 1.460 0.017, NE-CZ 1.326 0.013,
                  CZ-NH1 1.326 0.013, CZ-NH2 1.326 0.013""",
        "ASN": "CA-CB 1.527 0.026, CB-CG 1.506 0.023, CG-OD1 1.235 0.022, CG-ND2 1.324 0.025",
        "ASP": "CA-CB 1.535 0.022, CB-CG 1.513 0.021, CG-OD1 1.249 0.023, CG-OD2 1.249 0.023",
        "CYS": "CA-CB 1.526 0.013, CB-SG 1.812 0.016",
        "GLN": "CA-CB 1.535 0.022, CB-CG 1.521 0.027, CG-CD 1.506 0.023, CD-OE1 1.235 0.022, CD-NE2 1.324 0.025",
        "GLU": "CA-CB 1.535 0.022, CB-CG 1.517 0.019, CG-CD 1.515 0.015, CD-OE1 1.252 0.011, CD-OE2 1.252 0.011",
        "HIS": """CA-CB 1.535 0.022, CB-CG 1.492 0.016, CG-ND1 1.369 0.015, CG-CD2 1.353 0.017, ND1-CE1 1.343 0.025,
                  CD2-NE2 1.415 0.021, CE1-NE2 1.322 0.023""",
        "ILE": "CA-CB 1.544 0.023, CB-CG1 1.536 0.028, CB-CG2 1.524 0.031, CG1-CD1 1.500 0.069",
        "LEU": "CA-CB 1.533 0.023, CB-CG 1.521 0.029, CG-CD1 1.514 0.037, CG-CD2 1.514 0.037",
        "LYS": "CA-CB 1.535 0.022, CB-CG 1.521 0.027, CG-CD 1.520 0.034, CD-CE 1.508 0.025, CE-NZ 1.486 0.025",
        "MET": "CA-CB 1.535 0.022, CB-CG 1.509 0.032, CG-SD 1.807 0.026, SD-CE 1.774 0.056",
        "PHE": """CA-CB 1.535 0.022, CB-CG 1.509 0.017, CG-CD1 1.383 0.015, CG-CD2 1.383 0.015, CD1-CE1 1.388 0.020,
                  CD2-CE2 1.388 0.020, CE1-CZ 1.369 0.019, CE2-CZ 1.369 0.019""",
        "SER": "CA-CB 1.525 0.015, CB-OG 1.418 0.013",
        "THR": "CA-CB 1.529 0.026, CB-OG1 1.428 0.020, CB-CG2 1.519 0.033",
        "TRP": """CA-CB 1.535 0.022, CB-CG 1.498 0.018, CG-CD1 1.363 0.014, CG-CD2 1.432 0.017, CD1-NE1 1.375 0.017,
                  NE1-CE2 1.371 0.013, CD2-CE2 1.409 0.012, CD2-CE3 1.399 0.015, CE2-CZ2 1.393 0.017,
                  CE3-CZ3 1.380 0.017, CZ2-CH2 1.369 0.019, CZ3-CH2 1.396 0.016""",
        "TYR": """CA-CB 1.535 0.022, CB-CG 1.512 0.015, CG-CD1 1.387 0.013, CG-CD2 1.387 0.013, CD1-CE1 1.389 0.015,
                  CD2-CE2 1.389 0.015, CE1-CZ 1.381 0.013, CE2-CZ 1.381 0.013, CZ-OH 1.374 0.017""",
        "VAL": "CA-CB 1.543 0.021, CB-CG1 1.524 0.021, CB-CG2 1.524 0.021",
    }.items()
}

# Angle, mean, standard deviation.
ANGLES: dict[str, str] = {
    "GLY": "N-CA-C 113.1 2.5, CA-C-O 120.6 1.8",
    "PRO": """N-CA-C 112.1 2.6, CA-C-O 120.2 2.4, N-CA-CB 103.3 1.2, CB-CA-C 111.7 2.1, CA-CB-CG 104.8 1.9,
              CB-CG-CD 106.5 3.9, CG-CD-N 103.2 1.5, CA-N-CD 111.7 1.4""",
} | {
    name: f"{_BACKBONE_ANGLES}, {side_chain}"
    for name, side_chain in {
        "ALA": "N-CA-CB 110.1 1.4, CB-CA-C 110.1 1.5",
        "ARG": """N-CA-CB 110.6 1.8, CB-CA-C 110.4 2.0, CA-CB-CG 113.4 2.2, CB-CG-CD 111.6 2.6, CG-CD-NE 111.8 2.1,
                  CD-NE-CZ 123.6 1.4, NE-CZ-NH1 120.3 0.5, NE-CZ-NH2 120.3 0.5, NH1-CZ-NH2 119.4 1.1""",
        "ASN": """N-CA-CB 110.6 1.8, CB-CA-C 110.4 2.0, CA-CB-CG 113.4 2.2, CB-CG-ND2 116.7 2.4, CB-CG-OD1 121.6 2.0,
                  ND2-CG-OD1 121.9 2.3""",
        "ASP": """N-CA-CB 110.6 1.8, CB-CA-C 110.4 2.0, CA-CB-CG 113.4 2.2, CB-CG-OD1 118.3 0.9, CB-CG-OD2 118.3 0.9,
                  OD1-CG-OD2 123.3 1.9""",
        "CYS": "N-CA-CB 110.8 1.5, CB-CA-C 111.5 1.2, CA-CB-SG 114.2 1.1",
        "GLN": """N-CA-CB 110.6 1.8, CB-CA-C 110.4 2.0, CA-CB-CG 113.4 2.2, CB-CG-CD 111.6 2.6, CG-CD-OE1 121.6 2.0,
                  CG-CD-NE2 116.7 2.4, OE1-CD-NE2 121.9 2.3""",
        "GLU": """N-CA-CB 110.6 1.8, CB-CA-C 110.4 2.0, CA-CB-CG 113.4 2.2, CB-CG-CD 114.2 2.7, CG-CD-OE1 118.3 2.0,
                  CG-CD-OE2 118.3 2.0, OE1-CD-OE2 123.3 1.2""",
        "HIS": """N-CA-CB 110.6 1.8, CB-CA-C 110.4 2.0, CA-CB-CG 113.6 1.7, CB-CG-ND1 123.2 2.5, CB-CG-CD2 130.8 3.1,
                  CG-ND1-CE1 108.2 1.4, ND1-CE1-NE2 109.9 2.2, CE1-NE2-CD2 106.6 2.5, NE2-CD2-CG 109.2 1.9,
                  CD2-CG-ND1 106.0 1.4""",
        "ILE": """N-CA-CB 110.8 2.3, CB-CA-C 111.6 2.0, CA-CB-CG1 111.0 1.9, CB-CG1-CD1 113.9 2.8, CA-CB-CG2 110.9 2.0,
                  CG1-CB-CG2 111.4 2.2""",
        "LEU": """N-CA-CB 110.4 2.0, CB-CA-C 110.2 1.9, CA-CB-CG 115.3 2.3, CB-CG-CD1 111.0 1.7, CB-CG-CD2 111.0 1.7,
                  CD1-CG-CD2 110.5 3.0""",
        "LYS": """N-CA-CB 110.6 1.8, CB-CA-C 110.4 2.0, CA-CB-CG 113.4 2.2, CB-CG-CD 111.6 2.6, CG-CD-CE 111.9 3.0,
                  CD-CE-NZ 111.7 2.3""",
        "MET": """N-CA-CB 110.6 1.8, CB-CA-C 110.4 2.0, CA-CB-CG 113.3 1.7, CB-CG-SD 112.4 3.0, CG-SD-CE 100.2 1.6""",
        "PHE": """N-CA-CB 110.6 1.8, CB-CA-C 110.4 2.0, CA-CB-CG 113.9 2.4, CB-CG-CD1 120.8 0.7, CB-CG-CD2 120.8 0.7,
                  CD1-CG-CD2 118.3 1.3, CG-CD1-CE1 120.8 1.1, CG-CD2-CE2 120.8 1.1, CD1-CE1-CZ 120.1 1.2,
                  CD2-CE2-CZ 120.1 1.2, CE1-CZ-CE2 120.0 1.8""",
        "SER": "N-CA-CB 110.5 1.5, CB-CA-C 110.1 1.9, CA-CB-OG 111.2 2.7",
        "THR": """N-CA-CB 110.3 1.9, CB-CA-C 111.6 2.7, CA-CB-OG1 109.0 2.1, CA-CB-CG2 112.4 1.4,
                  OG1-CB-CG2 110.0 2.3""",
        "TRP": """N-CA-CB 110.6 1.8, CB-CA-C 110.4 2.0, CA-CB-CG 113.7 1.9, CB-CG-CD1 127.0 1.3, CB-CG-CD2 126.6 1.3,
                  CD1-CG-CD2 106.3 0.8, CG-CD1-NE1 110.1 1.0, CD1-NE1-CE2 109.0 0.9, NE1-CE2-CD2 107.3 1.0,
                  CE2-CD2-CG 107.3 0.8, CG-CD2-CE3 133.9 0.9, NE1-CE2-CZ2 130.4 1.1, CE3-CD2-CE2 118.7 1.2,
                  CD2-CE2-CZ2 122.3 1.2, CE2-CZ2-CH2 117.4 1.0, CZ2-CH2-CZ3 121.6 1.2, CH2-CZ3-CE3 121.2 1.1,
                  CZ3-CE3-CD2 118.8 1.3""",
        "TYR": """N-CA-CB 110.6 1.8, CB-CA-C 110.4 2.0, CA-CB-CG 113.4 1.9, CB-CG-CD1 121.0 0.6, CB-CG-CD2 121.0 0.6,
                  CD1-CG-CD2 117.9 1.1, CG-CD1-CE1 121.3 0.8, CG-CD2-CE2 121.3 0.8, CD1-CE1-CZ 119.8 0.9,
                  CD2-CE2-CZ 119.8 0.9, CE1-CZ-CE2 119.8 1.6, CE1-CZ-OH 120.1 2.7, CE2-CZ-OH 120.1 2.7""",
        "VAL": """N-CA-CB 111.5 2.2, CB-CA-C 111.4 1.9, CA-CB-CG1 110.9 1.5, CA-CB-CG2 110.9 1.5,
                  CG1-CB-CG2 110.9 1.6""",
    }.items()
}

# The peptide bond between residues i and i + 1: its length, (before another residue, before a proline), and the
# cosines of its two angles, (mean, standard deviation).
C_N_LENGTH = (1.329, 1.341)
C_N_LENGTH_STD = (0.014, 0.016)
CA_C_N_COS = (-0.4473, 0.0311)  # 116.568 degrees
C_N_CA_COS = (-0.5203, 0.0353)  # 121.352 degrees
