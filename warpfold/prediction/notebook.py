"""Show a prediction in a notebook: the report's page, with this prediction alone, in a frame."""

import html
from typing import TYPE_CHECKING

from warpfold.prediction.sanity import confidence_notices
from warpfold.report.report import ReportPage, Target, Warned, render

if TYPE_CHECKING:
    from warpfold.prediction.outputs import Prediction

HEIGHT = 900  # pixels of the frame; what is longer scrolls


def page_of(prediction: "Prediction") -> str:
    """Return the report of a prediction in memory: structure, pLDDT, PAE, as one HTML page that needs nothing else."""
    numbers = [("residues", str(len(prediction.sequence))), ("mean pLDDT", f"{prediction.mean_plddt:.1f}")]
    known = ("ipTM", prediction.iptm), ("pTM", prediction.ptm)
    numbers += [(title, f"{score:.2f}") for title, score in known if score is not None]
    spans = prediction.spans
    target = Target(
        name=prediction.name,
        sequence=":".join(prediction.sequence[span] for span in spans.values()),
        plddt=prediction.plddt,
        ca=prediction.ca,
        mmcif=prediction.mmcif(),
        pae=prediction.pae,
        max_pae=prediction.max_pae or 0.0,
        numbers=numbers,
        chains=spans if len(spans) > 1 else {},
        coverage=prediction.coverage,
    )
    doubts = confidence_notices(prediction.plddt, prediction.ptm, prediction.iptm)
    records = (*prediction.details.get("warnings", ()), *(notice.record() for notice in doubts))
    warnings = [Warned(record["text"]) for record in records]
    return render(ReportPage(prediction.name, "Folded by WarpFold.", targets=[target], warnings=warnings))


def in_notebook(prediction: "Prediction") -> str:
    """Return the page in a frame of its own, whose styles and scripts stay in it."""
    page = html.escape(page_of(prediction), quote=True)
    title = html.escape(prediction.name, quote=True)
    return f'<iframe srcdoc="{page}" title="{title}" width="100%" height="{HEIGHT}" style="border:0"></iframe>'
