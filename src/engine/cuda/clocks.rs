//! Clocks, power and heat of a device while it works, as the driver's management library reports them.

use super::device::Device;
use nvml_wrapper::Nvml;
use nvml_wrapper::enum_wrappers::device::{Clock, TemperatureSensor};

/// One reading; a field is absent where the library or the device has no answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Reading {
    /// Clock of the multiprocessors.
    pub sm_mhz: Option<u32>,
    /// Clock of the memory.
    pub memory_mhz: Option<u32>,
    /// What the device may draw at most.
    pub power_limit_w: Option<u32>,
    /// Of the chip.
    pub celsius: Option<u32>,
}

impl Reading {
    /// The lower of the clocks and of the limits, the higher of the temperatures.
    pub fn worst(self, other: Self) -> Self {
        let low = |a: Option<u32>, b: Option<u32>| a.into_iter().chain(b).min();
        Self {
            sm_mhz: low(self.sm_mhz, other.sm_mhz),
            memory_mhz: low(self.memory_mhz, other.memory_mhz),
            power_limit_w: low(self.power_limit_w, other.power_limit_w),
            celsius: self.celsius.into_iter().chain(other.celsius).max(),
        }
    }
}

/// The management library, if there is one.
pub struct Clocks {
    library: Option<Nvml>,
    bus_id: String,
}

impl Clocks {
    /// Of a device; `libnvidia-ml` is looked for at run time and may be missing.
    pub fn of(device: &Device) -> Self {
        Self { library: Nvml::init().ok(), bus_id: device.properties().bus_id.clone() }
    }

    /// What they are now.
    pub fn read(&self) -> Reading {
        let device = self.library.as_ref().and_then(|l| l.device_by_pci_bus_id(&*self.bus_id).ok());
        device.map_or(Reading::default(), |d| Reading {
            sm_mhz: d.clock_info(Clock::SM).ok(),
            memory_mhz: d.clock_info(Clock::Memory).ok(),
            power_limit_w: d.enforced_power_limit().ok().map(|milliwatt| milliwatt / 1000),
            celsius: d.temperature(TemperatureSensor::Gpu).ok(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Trips if what is absent counts as zero.
    #[test]
    fn the_worst_of_two_readings() {
        let a = Reading { sm_mhz: Some(1980), memory_mhz: None, power_limit_w: Some(700), celsius: Some(50) };
        let b = Reading { sm_mhz: Some(1500), memory_mhz: Some(3201), power_limit_w: None, celsius: Some(61) };
        let worst = Reading { sm_mhz: Some(1500), memory_mhz: Some(3201), power_limit_w: Some(700), celsius: Some(61) };
        assert_eq!((a.worst(b), b.worst(a), Reading::default().worst(a)), (worst, worst, a));
    }
}
