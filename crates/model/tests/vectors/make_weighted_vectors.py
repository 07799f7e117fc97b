"""Losses of weighted samples and their gradients by PyTorch, and weighted metrics by scikit-learn.

    pip install numpy scikit-learn torch
    python3 make_weighted_vectors.py > weighted.json
"""

import json

import numpy
import torch
from sklearn import metrics
from torch.nn import functional

random = numpy.random.default_rng(7)
SAMPLES = 8
OF_SAMPLES = numpy.array([0.5, 1, 2, 0, 3, 1, 0.25, 1.5], dtype="f4")


def case(loss, outputs, targets, weights, measured):
    """The loss is the mean over all samples of each one's loss times its weight, as Keras has it."""
    tensor = torch.tensor(outputs, requires_grad=True)
    mean = (loss(tensor, torch.tensor(targets), reduction="none") * torch.tensor(weights)).mean()
    mean.backward()
    return {
        "outputs": outputs.flatten().tolist(),
        "targets": targets.tolist(),
        "weights": weights.tolist(),
        "loss": mean.item(),
        "gradient": tensor.grad.flatten().tolist(),
        "metrics": measured,
    }


logits = random.normal(size=(SAMPLES, 3)).round(2).astype("f4")
classes = random.integers(0, 3, SAMPLES)
weights = OF_SAMPLES * numpy.array([1, 3, 0.5], dtype="f4")[classes]
shares = torch.softmax(torch.tensor(logits).double(), 1).numpy()
several = {
    "accuracy": metrics.accuracy_score(classes, shares.argmax(1), sample_weight=weights),
    "log_loss": metrics.log_loss(classes, shares, sample_weight=weights, labels=[0, 1, 2]),
}

logit = random.normal(size=SAMPLES).round(2).astype("f4")
logit[3] = logit[5]  # A tie.
clicked = (random.random(SAMPLES) > 0.5).astype("f4")
of_clicks = OF_SAMPLES * numpy.where(clicked > 0, 4, 1).astype("f4")
share = 1 / (1 + numpy.exp(-logit.astype("f8")))
binary = {
    "accuracy": metrics.accuracy_score(clicked, share > 0.5, sample_weight=of_clicks),
    "auc": metrics.roc_auc_score(clicked, logit, sample_weight=of_clicks),
    "log_loss": metrics.log_loss(clicked, share, sample_weight=of_clicks),
    "f1": metrics.f1_score(clicked, share > 0.5, sample_weight=of_clicks),
}

numbers = logits[:, 0].copy()
number = {
    "rmse": metrics.root_mean_squared_error(numbers, logit, sample_weight=weights),
    "mae": metrics.mean_absolute_error(numbers, logit, sample_weight=weights),
}
cases = {
    "cross-entropy": case(functional.cross_entropy, logits, classes, weights, several),
    "binary-cross-entropy": case(functional.binary_cross_entropy_with_logits, logit, clicked, of_clicks, binary),
    "mean-squared-error": case(functional.mse_loss, logit, numbers, weights, number),
    "mean-absolute-error": case(functional.l1_loss, logit, numbers, weights, number),
}
print(json.dumps(cases, indent=1))
