//! A GPT over bytes: pre-norm blocks, learned positions, head tied to the embedding.

use std::rc::Rc;

use candle_core::{Result as CandleResult, Tensor, Var};

use crate::config::{Shape, VOCAB};
use crate::data::Batch;
use crate::failure::Failure;
use crate::layers::Layers;
use crate::ops;

/// The model. Its blocks are what ebbtide sees as layers; embedding and head run outside of them.
#[derive(Debug)]
pub(crate) struct Model {
    embedding: Var,
    positions: Var,
    blocks: Vec<Rc<Block>>,
    norm: Norm,
}

impl Model {
    /// Builds the model over `params`, which are all of [`crate::params::specs`].
    pub(crate) fn new(shape: &Shape, params: &[(String, Var)]) -> Result<Self, Failure> {
        let device = params.first().map_or(&candle_core::Device::Cpu, |(_, v)| v.device());
        let mask = ops::causal_mask(shape.seq, device)?;
        let blocks = (0..shape.layers)
            .map(|i| Block::new(&format!("h.{i}."), shape, params, &mask).map(Rc::new))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            embedding: find(params, "wte")?,
            positions: find(params, "wpe")?,
            norm: Norm::new("ln_f", params)?,
            blocks,
        })
    }

    /// The mean loss over a batch.
    pub(crate) fn loss<'a>(
        &self,
        layers: &mut impl Layers<'a>,
        batch: &Batch,
    ) -> Result<Tensor, Failure> {
        let x = self.body(layers, &batch.inputs)?;
        Ok(ops::cross_entropy(&self.head(&x)?, &batch.targets)?)
    }

    /// Scores of the byte that comes after `tokens`, shape (1, length).
    pub(crate) fn next<'a>(
        &self,
        layers: &mut impl Layers<'a>,
        tokens: &Tensor,
    ) -> Result<Tensor, Failure> {
        let x = self.body(layers, tokens)?;
        let last = x.narrow(1, x.dim(1)? - 1, 1)?;
        Ok(self.head(&last)?)
    }

    /// Embedding and blocks.
    fn body<'a>(&self, layers: &mut impl Layers<'a>, tokens: &Tensor) -> Result<Tensor, Failure> {
        let mut x = self.embed(tokens)?;
        for (i, block) in self.blocks.iter().enumerate() {
            let run = Rc::clone(block);
            x = layers.layer(&format!("h.{i}"), &block.params, &x, move |x| run.forward(x))?;
        }
        Ok(x)
    }

    fn embed(&self, tokens: &Tensor) -> CandleResult<Tensor> {
        let (batch, seq) = tokens.dims2()?;
        let x = self.embedding.index_select(&tokens.flatten_all()?, 0)?;
        let x = x.reshape((batch, seq, self.embedding.dim(1)?))?;
        x.broadcast_add(&self.positions.narrow(0, 0, seq)?)
    }

    /// Scores, shape (tokens, vocabulary).
    fn head(&self, x: &Tensor) -> CandleResult<Tensor> {
        let x = self.norm.forward(x)?;
        let flat = x.reshape(((), x.dim(2)?))?;
        let logits = ops::matmul(&flat, &self.embedding.t()?)?;
        debug_assert_eq!(logits.dim(1)?, VOCAB);
        Ok(logits)
    }
}

fn find(params: &[(String, Var)], name: &str) -> Result<Var, Failure> {
    let found = params.iter().find(|(n, _)| n == name).map(|(_, var)| var.clone());
    found.ok_or_else(|| Failure::run_time(format!("no parameter {name}"), "please report this"))
}

#[derive(Debug)]
struct Norm {
    weight: Var,
    bias: Var,
}

impl Norm {
    fn new(name: &str, params: &[(String, Var)]) -> Result<Self, Failure> {
        let weight = find(params, &format!("{name}.weight"))?;
        Ok(Self { weight, bias: find(params, &format!("{name}.bias"))? })
    }

    fn forward(&self, x: &Tensor) -> CandleResult<Tensor> {
        ops::layer_norm(x, &self.weight, &self.bias)
    }
}

/// One transformer block. It depends on its input's shape alone, so it runs on any batch.
#[derive(Debug)]
struct Block {
    params: Vec<(String, Var)>,
    norm1: Norm,
    query: Var,
    key: Var,
    value: Var,
    out: Var,
    norm2: Norm,
    up: Var,
    down: Var,
    heads: usize,
    mask: Tensor,
}

impl Block {
    fn new(
        prefix: &str,
        shape: &Shape,
        params: &[(String, Var)],
        mask: &Tensor,
    ) -> Result<Self, Failure> {
        let named = |name: &str| find(params, &format!("{prefix}{name}"));
        Ok(Self {
            norm1: Norm::new(&format!("{prefix}ln1"), params)?,
            query: named("attn.q")?,
            key: named("attn.k")?,
            value: named("attn.v")?,
            out: named("attn.out")?,
            norm2: Norm::new(&format!("{prefix}ln2"), params)?,
            up: named("mlp.up")?,
            down: named("mlp.down")?,
            heads: shape.heads,
            mask: mask.clone(),
            params: params.iter().filter(|(n, _)| n.starts_with(prefix)).cloned().collect(),
        })
    }

    fn forward(&self, x: &Tensor) -> CandleResult<Tensor> {
        let x = (x + self.attention(&self.norm1.forward(x)?)?)?;
        let mlp = self.mlp(&self.norm2.forward(&x)?)?;
        x + mlp
    }

    fn attention(&self, x: &Tensor) -> CandleResult<Tensor> {
        let (batch, seq, d) = x.dims3()?;
        let flat = x.reshape((batch * seq, d))?;
        let split = |weight: &Var| {
            let y = ops::matmul(&flat, weight)?;
            y.reshape((batch, seq, self.heads, d / self.heads))?.transpose(1, 2)?.contiguous()
        };
        let (query, key, value) = (split(&self.query)?, split(&self.key)?, split(&self.value)?);
        let scale = 1. / ((d / self.heads) as f64).sqrt();
        let scores = (ops::matmul(&query, &key.t()?)?.to_dtype(self.mask.dtype())? * scale)?;
        // A sample is shorter than the mask.
        let mask = self.mask.narrow(2, 0, seq)?.narrow(3, 0, seq)?;
        let weights = ops::softmax(&scores.broadcast_add(&mask)?)?.to_dtype(x.dtype())?;
        let mixed = ops::matmul(&weights, &value)?.transpose(1, 2)?.contiguous()?;
        ops::matmul(&mixed.reshape((batch * seq, d))?, &self.out)?.reshape((batch, seq, d))
    }

    fn mlp(&self, x: &Tensor) -> CandleResult<Tensor> {
        let (batch, seq, d) = x.dims3()?;
        let hidden = ops::matmul(&x.reshape((batch * seq, d))?, &self.up)?.gelu()?;
        ops::matmul(&hidden, &self.down)?.reshape((batch, seq, d))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;
    use crate::args::Precision;
    use crate::data::{Batches, Corpus};
    use crate::layers::Plain;
    use crate::params;

    fn model(dtype: Precision) -> (Shape, Vec<(String, Var)>, Model) {
        let shape = Shape { layers: 2, d_model: 16, heads: 2, seq: 16, batch: 2, dtype };
        let params = params::create(&shape, 1, &Device::Cpu).unwrap();
        let model = Model::new(&shape, &params).unwrap();
        (shape, params, model)
    }

    fn batch(shape: &Shape) -> Batch {
        let corpus = Corpus::load(&[], shape.seq).unwrap();
        Batches::new(1, shape.batch, shape.seq).draw(&corpus, &Device::Cpu).unwrap()
    }

    #[test]
    fn every_parameter_gets_a_gradient_that_is_not_zero() {
        for dtype in [Precision::F32, Precision::Bf16] {
            let (shape, params, model) = model(dtype);
            let loss = model.loss(&mut Plain, &batch(&shape)).unwrap();
            let value = loss.to_scalar::<f32>().unwrap();
            // Nothing is learnt yet: about the entropy of 256 equally likely bytes.
            assert!((value - 256f32.ln()).abs() < 0.2, "{value}");
            let grads = loss.backward().unwrap();
            for (name, var) in &params {
                let grad = grads.get(var).unwrap_or_else(|| panic!("{name} has no gradient"));
                assert_eq!(grad.dtype(), shape.candle_dtype(), "{name}");
                let grad = grad.to_dtype(DType::F32).unwrap().abs().unwrap();
                let sum = grad.sum_all().unwrap().to_scalar::<f32>().unwrap();
                assert!(sum.is_finite() && sum > 0., "{name}: {sum}");
            }
        }
    }

    #[test]
    fn a_byte_sees_only_those_before_it() {
        let (_, _, model) = model(Precision::F32);
        let run = |last: u32| {
            let tokens = Tensor::new(&[[5u32, 9, 200, last]], &Device::Cpu).unwrap();
            let x = model.body(&mut Plain, &tokens).unwrap().narrow(1, 0, 3).unwrap();
            x.flatten_all().unwrap().to_vec1::<f32>().unwrap()
        };
        assert_eq!(run(1), run(250));
    }

    #[test]
    fn a_block_runs_on_a_batch_of_one_with_the_same_result() {
        let (shape, _, model) = model(Precision::F32);
        let tokens = batch(&shape).inputs;
        let all = model.body(&mut Plain, &tokens).unwrap().narrow(0, 0, 1).unwrap();
        let one = model.body(&mut Plain, &tokens.narrow(0, 0, 1).unwrap()).unwrap();
        let gap = (all - one).unwrap().abs().unwrap().flatten_all().unwrap().max(0).unwrap();
        assert!(gap.to_scalar::<f32>().unwrap() < 1e-5);
    }
}
