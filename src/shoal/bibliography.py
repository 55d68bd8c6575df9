"""The papers that Shoal implements or compares with: short citation, authors, title, link."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Reference:
    """One paper; `short` is how tables and messages cite it.

    Attributes:
        short: Authors and year, such as `Geyer et al. (2017)`.
        authors: All authors.
        title: The full title.
        link: Where it can be read; empty where there is no public copy.
    """

    short: str
    authors: str
    title: str
    link: str = ""

    def __str__(self) -> str:
        return ". ".join(filter(None, (f"{self.short}: {self.authors.removesuffix('.')}", self.title, self.link)))


THESIS = Reference(
    "Thesis", "a thesis whose title page is not in our copy", "End-to-end differential privacy in federated learning"
)
GEYER = Reference(
    "Geyer et al. (2017)",
    "R. C. Geyer, T. Klein, M. Nabi",
    "Differentially Private Federated Learning: A Client Level Perspective",
    "https://arxiv.org/abs/1712.07557",
)
PFL = Reference(
    "Bhaskar et al. (2025)",
    "U. Bhaskar, V. Srivastava, A. Manjunatha Vummintala, N. Manwani, S. Gujar",
    "Optimal Strategies for Federated Learning Maintaining Client Privacy",
    "https://arxiv.org/abs/2501.14453",
)
WEI = Reference(
    "Wei et al. (2023)",
    "W. Wei, L. Liu, J. Zhou, K.-H. Chow, Y. Wu",
    "Securing Distributed SGD against Gradient Leakage Threats",
    "https://arxiv.org/abs/2305.06473",
)
_OTHERS = (
    ("Abadi et al. (2016)", "M. Abadi et al.", "Deep Learning with Differential Privacy", "1607.00133"),
    ("Andrew et al. (2021)", "G. Andrew, O. Thakkar, H. B. McMahan, S. Ramaswamy",
     "Differentially Private Learning with Adaptive Clipping", "1905.03871"),
    ("Arivazhagan et al. (2019)", "M. G. Arivazhagan, V. Aggarwal, A. K. Singh, S. Choudhary",
     "Federated Learning with Personalization Layers", "1912.00818"),
    ("Bassily et al. (2014)", "R. Bassily, A. Smith, A. Thakurta",
     "Private Empirical Risk Minimization: Efficient Algorithms and Tight Error Bounds", "1405.7085"),
    ("Boenisch et al. (2023)", "F. Boenisch et al.",
     "When the Curious Abandon Honesty: Federated Learning Is Not Private", "2112.02918"),
    ("Yin et al. (2021)", "H. Yin, A. Mallya, A. Vahdat, J. M. Alvarez, J. Kautz, P. Molchanov",
     "See through Gradients: Image Batch Recovery via GradInversion", "2104.07586"),
    ("Carlini et al. (2022)", "N. Carlini et al.",
     "Membership Inference Attacks From First Principles", "2112.03570"),
    ("Choquette-Choo et al. (2023)", "C. A. Choquette-Choo et al.",
     "(Amplified) Banded Matrix Factorization: A Unified Approach to Private Training", "2306.08153"),
    ("De et al. (2022)", "S. De, L. Berrada, J. Hayes, S. L. Smith, B. Balle",
     "Unlocking High-Accuracy Differentially Private Image Classification through Scale", "2204.13650"),
    ("Fowl et al. (2022)", "L. Fowl, J. Geiping, W. Czaja, M. Goldblum, T. Goldstein",
     "Robbing the Fed: Directly Obtaining Private Data in Federated Learning with Modified Models", "2110.13057"),
    ("Fu et al. (2023)", "J. Fu, Q. Ye, H. Hu, Z. Chen, L. Wang, K. Wang, X. Ran",
     "DPSUR: Accelerating Differentially Private Stochastic Gradient Descent Using Selective Update and Release",
     "2311.14056"),
    ("Geiping et al. (2020)", "J. Geiping, H. Bauermeister, H. Dröge, M. Moeller",
     "Inverting Gradients: How Easy Is It to Break Privacy in Federated Learning?", "2003.14053"),
    ("Kairouz et al. (2021)", "P. Kairouz et al.",
     "Practical and Private (Deep) Learning without Sampling or Shuffling", "2103.00039"),
    ("Kairouz, Liu & Steinke (2021)", "P. Kairouz, Z. Liu, T. Steinke",
     "The Distributed Discrete Gaussian Mechanism for Federated Learning with Secure Aggregation", "2102.06387"),
    ("Li et al. (2020)", "T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith",
     "Federated Optimization in Heterogeneous Networks", "1812.06127"),
    ("Loshchilov & Hutter (2019)", "I. Loshchilov, F. Hutter",
     "Decoupled Weight Decay Regularization", "1711.05101"),
    ("McMahan et al. (2017)", "H. B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Agüera y Arcas",
     "Communication-Efficient Learning of Deep Networks from Decentralized Data", "1602.05629"),
    ("Papernot & Steinke (2022)", "N. Papernot, T. Steinke",
     "Hyperparameter Tuning with Renyi Differential Privacy", "2110.03620"),
    ("Pichapati et al. (2019)", "V. Pichapati, A. T. Suresh, F. X. Yu, S. J. Reddi, S. Kumar",
     "AdaCliP: Adaptive Clipping for Private SGD", "1908.07643"),
    ("Qiao et al. (2019)", "S. Qiao, H. Wang, C. Liu, W. Shen, A. Yuille",
     "Micro-Batch Training with Batch-Channel Normalization and Weight Standardization", "1903.10520"),
    ("Tramèr & Boneh (2021)", "F. Tramèr, D. Boneh",
     "Differentially Private Learning Needs Better Features (or Much More Data)", "2011.11660"),
    ("Wei et al. (2020)", "W. Wei et al.",
     "A Framework for Evaluating Gradient Leakage Attacks in Federated Learning", "2004.10397"),
    ("Xie & Huang (2026)", "F. Xie, X. Huang",
     "Revisiting Privacy Amplification by Subsampling in Selective Release DPSGD", "2606.04384"),
    ("Yeom et al. (2018)", "S. Yeom, I. Giacomelli, M. Fredrikson, S. Jha",
     "Privacy Risk in Machine Learning: Analyzing the Connection to Overfitting", "1709.01604"),
    ("Zhao et al. (2020)", "B. Zhao, K. R. Mopuri, H. Bilen",
     "iDLG: Improved Deep Leakage from Gradients", "2001.02610"),
    ("Zhu et al. (2019)", "L. Zhu, Z. Liu, S. Han", "Deep Leakage from Gradients", "1906.08935"),
)  # fmt: skip
SHOKRI = Reference(
    "Shokri & Shmatikov (2015)",
    "R. Shokri, V. Shmatikov",
    "Privacy-Preserving Deep Learning",
    "https://doi.org/10.1145/2810103.2813687",
)
_ACCOUNTING = (
    ("Balle, Barthe, Gaboardi (2018)", "B. Balle, G. Barthe, M. Gaboardi",
     "Privacy Amplification by Subsampling: Tight Analyses via Couplings and Divergences", "1807.01647"),
    ("Balle, Wang (2018)", "B. Balle, Y.-X. Wang",
     "Improving the Gaussian Mechanism for Differential Privacy: Analytical Calibration and Optimal Denoising",
     "1805.06530"),
    ("Chua et al. (2024)", "L. Chua et al.", "How Private are DP-SGD Implementations?", "2403.17673"),
    ("Denisov et al. (2022)", "S. Denisov et al.",
     "Improved Differential Privacy for SGD via Optimal Private Linear Operators on Adaptive Streams", "2202.08312"),
    ("Doroshenko et al. (2022)", "V. Doroshenko, B. Ghazi, P. Kamath, R. Kumar, P. Manurangsi",
     "Connect the Dots: Tighter Discrete Approximations of Privacy Loss Distributions", "2207.04380"),
    ("Koskela, Jälkö, Honkela (2020)", "A. Koskela, J. Jälkö, A. Honkela",
     "Computing Tight Differential Privacy Guarantees Using FFT", "1906.03049"),
    ("Zhu, Dong, Wang (2022)", "Y. Zhu, J. Dong, Y.-X. Wang",
     "Optimal Accounting of Differential Privacy via Characteristic Function", "2106.08567"),
)  # fmt: skip
BIBLIOGRAPHY = (
    *(THESIS, GEYER, PFL, WEI, SHOKRI),
    *(Reference(name, who, title, f"https://arxiv.org/abs/{number}") for name, who, title, number in _OTHERS),
)


ACCOUNTING = tuple(
    Reference(name, who, title, f"https://arxiv.org/abs/{number}") for name, who, title, number in _ACCOUNTING
)
"""What accounting/theorems.py cites."""


def cited(text: str) -> list[Reference]:
    """The references whose short citations occur in a text, in the order of the bibliography."""
    text = re.sub(r" (\d{4})\b", r" (\1)", text)  # theorems are cited as `Balle, Wang 2018, Theorem 8`
    return [reference for reference in (*BIBLIOGRAPHY, *ACCOUNTING) if reference.short in text]


def markdown() -> str:
    """The bibliography as a table for the documentation."""
    rows = [f"| {each.short} | {each.authors} | {each.title} | {each.link} |" for each in BIBLIOGRAPHY]
    return "\n".join(["| paper | authors | title | link |", "|---|---|---|---|", *rows, ""])
