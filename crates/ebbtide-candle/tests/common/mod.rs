//! A small transformer-like model, run plainly and through ebbtide on the same weights.

// Each test binary uses a part, and shares it with nobody.
#![allow(dead_code, unreachable_pub, clippy::pedantic)]

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Result, Tensor, Var};
use ebbtide_candle::{Policies, Swap, Tier};

/// Numbers without symmetry, the same on every run.
pub fn numbers(shape: &[usize], seed: u32, dtype: DType) -> Tensor {
    let count: usize = shape.iter().product();
    let values: Vec<f32> = (0..count)
        .map(|i| {
            let mut x = (i as u32 ^ seed.wrapping_mul(0x9E37_79B9)).wrapping_mul(0x85EB_CA6B);
            x ^= x >> 13;
            x = x.wrapping_mul(0xC2B2_AE35);
            x ^= x >> 16;
            (x as f32 / u32::MAX as f32 - 0.5) * 0.4
        })
        .collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

pub fn var(shape: &[usize], seed: u32, dtype: DType) -> Var {
    Var::from_tensor(&numbers(shape, seed, dtype)).unwrap()
}

/// A pre-norm attention block with a residual, then a gelu MLP with another one.
pub struct Block {
    pub params: Vec<(String, Var)>,
    heads: usize,
}

impl Block {
    pub fn new(width: usize, heads: usize, seed: u32, dtype: DType) -> Self {
        let shapes: [(&str, Vec<usize>); 6] = [
            ("norm", vec![width]),
            ("qkv", vec![width, 3 * width]),
            ("proj", vec![width, width]),
            ("up", vec![width, 4 * width]),
            ("down", vec![4 * width, width]),
            ("norm2", vec![width]),
        ];
        let params = shapes
            .iter()
            .enumerate()
            .map(|(i, (name, shape))| (name.to_string(), var(shape, seed * 16 + i as u32, dtype)));
        Self { params: params.collect(), heads }
    }

    fn get(&self, name: &str) -> &Var {
        &self.params.iter().find(|(n, _)| n == name).unwrap().1
    }

    fn norm(x: &Tensor, weight: &Var) -> Result<Tensor> {
        let mean = x.mean_keepdim(candle_core::D::Minus1)?;
        let x = x.broadcast_sub(&mean)?;
        let var = x.sqr()?.mean_keepdim(candle_core::D::Minus1)?;
        x.broadcast_div(&(var + 1e-5)?.sqrt()?)?.broadcast_mul(weight)
    }

    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (b, t, d) = x.dims3()?;
        let h = Self::norm(x, self.get("norm"))?.reshape((b * t, d))?;
        let qkv = h.matmul(self.get("qkv"))?.reshape((b, t, 3, self.heads, d / self.heads))?;
        let qkv = qkv.permute((2, 0, 3, 1, 4))?;
        let (q, k, v) = (qkv.get(0)?, qkv.get(1)?, qkv.get(2)?);
        let scores = q.contiguous()?.matmul(&k.t()?.contiguous()?)?;
        let scores = (scores * (1.0 / ((d / self.heads) as f64).sqrt()))?;
        let max = scores.max_keepdim(candle_core::D::Minus1)?.detach();
        let e = scores.broadcast_sub(&max)?.exp()?;
        let p = e.broadcast_div(&e.sum_keepdim(candle_core::D::Minus1)?)?;
        let a = p.matmul(&v.contiguous()?)?.transpose(1, 2)?.reshape((b * t, d))?;
        let x = (x + a.matmul(self.get("proj"))?.reshape((b, t, d))?)?;
        let h = Self::norm(&x, self.get("norm2"))?.reshape((b * t, d))?;
        let h = h.matmul(self.get("up"))?.gelu()?.matmul(self.get("down"))?;
        x + h.reshape((b, t, d))?
    }
}

pub struct Model {
    pub embed: Var,
    pub blocks: Vec<Block>,
    pub dtype: DType,
}

pub const WIDTH: usize = 16;
pub const VOCAB: usize = 11;

impl Model {
    pub fn new(layers: usize, dtype: DType) -> Self {
        let block = |i| Block::new(WIDTH, 2, 100 + i as u32, dtype);
        Self {
            embed: var(&[VOCAB, WIDTH], 1, dtype),
            blocks: (0..layers).map(block).collect(),
            dtype,
        }
    }

    pub fn ids(&self, batch: usize, seq: usize, seed: u32) -> Tensor {
        let ids: Vec<u32> =
            (0..batch * seq).map(|i| (i as u32 * 7 + seed * 3) % VOCAB as u32).collect();
        Tensor::from_vec(ids, (batch, seq), &Device::Cpu).unwrap()
    }

    pub fn embed(&self, ids: &Tensor) -> Result<Tensor> {
        let (b, t) = ids.dims2()?;
        self.embed.embedding(&ids.flatten_all()?)?.reshape((b, t, WIDTH))
    }

    /// Tied head and a loss.
    pub fn loss(&self, h: &Tensor) -> Result<Tensor> {
        let (b, t, d) = h.dims3()?;
        let logits = h.reshape((b * t, d))?.matmul(&self.embed.t()?)?;
        logits.sqr()?.mean_all()
    }

    pub fn plain(&self, ids: &Tensor) -> (Tensor, GradStore) {
        let mut h = self.embed(ids).unwrap();
        for block in &self.blocks {
            h = block.forward(&h).unwrap();
        }
        let loss = self.loss(&h).unwrap();
        let gradients = loss.backward().unwrap();
        (loss, gradients)
    }

    pub fn swapped(
        &self,
        swap: &Swap,
        ids: &Tensor,
    ) -> std::result::Result<(Tensor, GradStore), ebbtide_candle::Error> {
        let mut step = swap.step();
        let mut h = self.embed(ids)?;
        for (i, block) in self.blocks.iter().enumerate() {
            h = step.layer(&format!("h.{i}"), &block.params, &h, |h| block.forward(h))?;
        }
        let loss = self.loss(&h)?;
        let gradients = step.backward(&loss)?;
        Ok((loss, gradients))
    }

    pub fn vars(&self) -> Vec<(String, Var)> {
        let mut vars = vec![("embed".to_string(), self.embed.clone())];
        for (i, block) in self.blocks.iter().enumerate() {
            vars.extend(block.params.iter().map(|(n, v)| (format!("h.{i}.{n}"), v.clone())));
        }
        vars
    }
}

pub fn bits(tensor: &Tensor) -> Vec<u64> {
    let flat = tensor.flatten_all().unwrap();
    match tensor.dtype() {
        DType::F64 => flat.to_vec1::<f64>().unwrap().into_iter().map(f64::to_bits).collect(),
        _ => {
            let flat = flat.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap();
            flat.into_iter().map(|v| u64::from(v.to_bits())).collect()
        }
    }
}

/// Fails unless both hold the same gradients for all of these, bit for bit.
pub fn assert_same(vars: &[(String, Var)], a: &GradStore, b: &GradStore) {
    for (name, var) in vars {
        match (a.get(var), b.get(var)) {
            (Some(a), Some(b)) => {
                assert_eq!(a.dtype(), b.dtype(), "{name}");
                assert!(bits(a) == bits(b), "gradient of {name} differs");
            }
            (a, b) => assert_eq!(a.is_some(), b.is_some(), "{name}"),
        }
    }
}

/// A file beside the build: on a disk, where the folder for temporary files may be RAM.
pub fn file_tier() -> Tier {
    Tier::File { dir: env!("CARGO_TARGET_TMPDIR").into() }
}

pub fn swap(policy: &str, layers: usize) -> Swap {
    Swap::builder(Policies::parse(policy, layers).unwrap()).tier(file_tier()).build().unwrap()
}
