//! Requests of control-socket clients.

use firstlight_init_control::{FromInit, ToInit};

use super::{Message, STACK, Supervisor};
use crate::actions;
use crate::clock::now_us;
use crate::control::{ClientId, Server};
use crate::record::cut;
use crate::shutdown::Goal;

impl Supervisor {
    pub(super) fn handle_clients(&mut self) {
        let Some(server) = &mut self.server else { return };
        for (client, message) in server.turn() {
            self.handle_client(client, message);
            self.drain();
        }
    }

    fn handle_client(&mut self, client: ClientId, message: ToInit) {
        match message {
            ToInit::Subscribe => {
                let now = self.gpu_message();
                if let Some(server) = &mut self.server {
                    server.subscribe(client);
                    server.send(client, &now);
                }
                self.send_daemons(client);
            }
            ToInit::SubscribeLog => {
                if let Some(server) = &mut self.server {
                    server.subscribe_log(client);
                }
            }
            ToInit::Listening { at_us } => self.agent_listens(at_us.min(now_us())),
            ToInit::Event { at_us, kind: what, object, detail } => {
                self.recorder.event(at_us.min(now_us()), &cut(what), &cut(object), &cut(detail));
            }
            ToInit::Record => {
                self.read_whole_log();
                self.save();
                let record = FromInit::Record(Box::new(self.recorder.record().clone()));
                if let Some(server) = &mut self.server {
                    server.send(client, &record);
                }
            }
            ToInit::LoadModule { name, parameters } => self.load_module(client, name, parameters),
            ToInit::PowerOff { reason } => self.begin_shutdown(Goal::PowerOff, &cut(reason)),
        }
    }

    /// Loads a module for a client, on a thread: a driver may take its time.
    fn load_module(&mut self, client: ClientId, name: String, parameters: String) {
        let (inputs, outbox, asked) = (self.inputs(), self.outbox.clone(), name.clone());
        let spawned = std::thread::Builder::new().name("load-module".to_owned()).stack_size(STACK).spawn(move || {
            let result = actions::load_requested(&inputs, &asked, &parameters);
            outbox.send(Message::Module(client, asked, result));
        });
        if let Err(error) = spawned {
            self.module_loaded(client, name, Err(format!("cannot start a thread: {error}; is memory short?")));
        }
    }

    pub(super) fn module_loaded(&mut self, client: ClientId, name: String, result: Result<String, String>) {
        let detail = result.as_ref().unwrap_or_else(|error| error).clone();
        self.recorder.event(now_us(), "module-requested", &cut(name.clone()), &cut(detail));
        let error = result.err();
        if let Some(server) = &mut self.server {
            server.send(client, &FromInit::Module { name, error });
        }
    }

    fn gpu_message(&self) -> FromInit {
        FromInit::Gpus { scanned: self.scanned, gpus: self.recorder.record().gpus.clone() }
    }

    /// Requests an update of the GPUs to all subscribers at the end of this loop
    /// iteration: eight GPUs that become ready at once are one coalesced update.
    pub(super) fn publish_gpus(&mut self) {
        self.gpus_changed = true;
    }

    /// Sends the requested update.
    pub(super) fn send_gpus(&mut self) {
        if !std::mem::take(&mut self.gpus_changed) || !self.server.as_ref().is_some_and(Server::has_subscribers) {
            return;
        }
        let message = self.gpu_message();
        if let Some(server) = &mut self.server {
            server.publish(&message);
        }
    }
}
