//! The same plan over other links.

use crate::base::status::Result;
use crate::fail;
use crate::stream::plan::experts::Experts;
use crate::stream::plan::steps::Pass;
use crate::stream::plan::{Forecast, Inputs, Links, Plan, predict};

impl Forecast {
    /// Tokens a second, where a pass makes one; infinite where a pass takes nothing that
    /// is known.
    pub fn tokens_per_s(&self) -> f64 {
        1e9 / self.pass_ns as f64
    }
}

impl Plan {
    /// What a pass would take over `links`; those not named are as in `inputs`.
    pub fn what_if(&self, inputs: &Inputs, links: Links) -> Result<Forecast> {
        self.fits(inputs)?;
        let experts = Experts::of(inputs, self.seat, &self.on_processor);
        let pass = Pass::of(self, inputs, &experts)?;
        let links = links.or(inputs.links);
        match predict::forecast(&pass, &links)? {
            Some(forecast) => Ok(forecast),
            None => fail!(
                Invalid,
                "a link that the plan needs is not known (device {}, disk {}): say how fast it \
                 is, as in h2d=13,disk=3.3",
                links.device,
                links.disk
            ),
        }
    }

    /// Fails where it was made for other units.
    pub(super) fn fits(&self, inputs: &Inputs) -> Result<()> {
        let (has, len) = (inputs.units.units.len(), self.homes.len());
        if has != len || self.on_processor.len() != len {
            fail!(Invalid, "the plan is for {len} units, the model has {has}");
        }
        Ok(())
    }
}
