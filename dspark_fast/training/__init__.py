from dspark_fast.training.loss import Loss, LossWeights, Vocabulary, dspark_loss

__all__ = ["Loss", "LossWeights", "Vocabulary", "dspark_loss"]
